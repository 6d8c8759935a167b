#include "textflag.h"

// The offsets in type key.
#define POWERS 240
#define MIDDLES 368
#define ROUNDS 496

DATA ·swap<>+0(SB)/8, $0x08090a0b0c0d0e0f
DATA ·swap<>+8(SB)/8, $0x0001020304050607
DATA ·swap<>+16(SB)/8, $0x08090a0b0c0d0e0f
DATA ·swap<>+24(SB)/8, $0x0001020304050607
GLOBL ·swap<>(SB), RODATA|NOPTR, $32

// What is added to a counter block, as a number: 0 and 1, then twice 2, 4, 6, 8.
DATA ·add<>+0(SB)/8, $0
DATA ·add<>+8(SB)/8, $0
DATA ·add<>+16(SB)/8, $1
DATA ·add<>+24(SB)/8, $0
DATA ·add<>+32(SB)/8, $2
DATA ·add<>+40(SB)/8, $0
DATA ·add<>+48(SB)/8, $2
DATA ·add<>+56(SB)/8, $0
DATA ·add<>+64(SB)/8, $4
DATA ·add<>+72(SB)/8, $0
DATA ·add<>+80(SB)/8, $4
DATA ·add<>+88(SB)/8, $0
DATA ·add<>+96(SB)/8, $6
DATA ·add<>+104(SB)/8, $0
DATA ·add<>+112(SB)/8, $6
DATA ·add<>+120(SB)/8, $0
DATA ·add<>+128(SB)/8, $8
DATA ·add<>+136(SB)/8, $0
DATA ·add<>+144(SB)/8, $8
DATA ·add<>+152(SB)/8, $0
GLOBL ·add<>(SB), RODATA|NOPTR, $160

DATA ·poly<>+0(SB)/8, $1
DATA ·poly<>+8(SB)/8, $0xc200000000000000
GLOBL ·poly<>(SB), RODATA|NOPTR, $16

// A turn encrypts the counters of eight blocks, two in a register, and hashes
// eight blocks: each is multiplied by its own power of H, the products are added,
// and the sum is reduced once. Both are independent, so their instructions
// alternate, and the CPU runs them side by side.
//
// A block in a register is a number, its last byte the lowest; see power in
// gcm_amd64.go for the order of its bits. A product of two has 256 bits: the
// products of the lower and of the upper halves, and in the middle, 64 bits up,
// that of the halves' sums less the other two (Karatsuba).
//
// Registers of all functions:
//
//	DI      the key
//	DX      its last round key
//	Y0-Y3   eight blocks, in the order of memory
//	Y6-Y8   the product so far: low, middle, high
//	X11     the hash so far, as a number; the upper half of Y11 is 0
//	Y12     swap
//	Y13     the next two counter blocks, as numbers
//	X14     poly
//	Y4, Y5, Y9, Y10 temporary values

// BEGIN loads what stays the same, for the key at DI.
#define BEGIN                    \
	VMOVDQU ·swap<>(SB), Y12 \
	VMOVDQU ·poly<>(SB), X14 \
	MOVQ    ROUNDS(DI), DX   \
	SHLQ    $4, DX           \
	ADDQ    DI, DX

// COUNTER loads the counter block at mem.
#define COUNTER(mem)            \
	VBROADCASTI128 mem, Y13 \
	VPSHUFB Y12, Y13, Y13   \
	VPADDD  ·add<>+0(SB), Y13, Y13

// COUNT makes eight counter blocks with the first round key added.
#define COUNT                            \
	VBROADCASTI128 0(DI), Y4         \
	VPADDD  ·add<>+32(SB), Y13, Y1   \
	VPADDD  ·add<>+64(SB), Y13, Y2   \
	VPADDD  ·add<>+96(SB), Y13, Y3   \
	VPSHUFB Y12, Y13, Y0             \
	VPADDD  ·add<>+128(SB), Y13, Y13 \
	VPSHUFB Y12, Y1, Y1              \
	VPSHUFB Y12, Y2, Y2              \
	VPSHUFB Y12, Y3, Y3              \
	VPXOR   Y4, Y0, Y0               \
	VPXOR   Y4, Y1, Y1               \
	VPXOR   Y4, Y2, Y2               \
	VPXOR   Y4, Y3, Y3

#define ROUND(n)                      \
	VBROADCASTI128 (16*n)(DI), Y4 \
	VAESENC Y4, Y0, Y0            \
	VAESENC Y4, Y1, Y1            \
	VAESENC Y4, Y2, Y2            \
	VAESENC Y4, Y3, Y3

// LAST makes the rounds from 10 on, which a key of 128 bits does not have but for
// the last one.
#define LAST(last)              \
	CMPQ ROUNDS(DI), $12    \
	JB   last               \
	ROUND(10)               \
	ROUND(11)               \
	CMPQ ROUNDS(DI), $14    \
	JB   last               \
	ROUND(12)               \
	ROUND(13)               \
last:                           \
	VBROADCASTI128 (DX), Y4 \
	VAESENCLAST Y4, Y0, Y0  \
	VAESENCLAST Y4, Y1, Y1  \
	VAESENCLAST Y4, Y2, Y2  \
	VAESENCLAST Y4, Y3, Y3

// LOAD loads the two blocks at mem and the powers at off.
#define LOAD(mem, off)                \
	VMOVDQU mem, Y9               \
	VMOVDQU (POWERS+off)(DI), Y10 \
	VPSHUFB Y12, Y9, Y9

// FIRST begins the product of Y9 and Y10.
#define FIRST(off)                    \
	VPSHUFD $78, Y9, Y7           \
	VPCLMULQDQ $0x00, Y10, Y9, Y6 \
	VPXOR Y9, Y7, Y7              \
	VPCLMULQDQ $0x11, Y10, Y9, Y8 \
	VPCLMULQDQ $0x00, (MIDDLES+off)(DI), Y7, Y7

// NEXT adds the product of Y9 and Y10.
#define NEXT(off)                                   \
	VPSHUFD $78, Y9, Y4                         \
	VPCLMULQDQ $0x00, Y10, Y9, Y5               \
	VPXOR Y9, Y4, Y4                            \
	VPXOR Y5, Y6, Y6                            \
	VPCLMULQDQ $0x11, Y10, Y9, Y5               \
	VPCLMULQDQ $0x00, (MIDDLES+off)(DI), Y4, Y4 \
	VPXOR Y5, Y8, Y8                            \
	VPXOR Y4, Y7, Y7

// HALVES adds the product's second block to its first, and completes the middle.
#define HALVES                   \
	VEXTRACTI128 $1, Y6, X5  \
	VEXTRACTI128 $1, Y7, X9  \
	VEXTRACTI128 $1, Y8, X10 \
	VPXOR X5, X6, X6         \
	VPXOR X9, X7, X7         \
	VPXOR X10, X8, X8        \
	VPXOR X6, X7, X7         \
	VPXOR X8, X7, X7

// REDUCE makes the product of 256 bits in X6, X7 and X8 the hash. Twice the
// lowest 64 bits are replaced by what is the same modulo g: poly times them, 64
// bits up, and themselves 128 bits up.
#define REDUCE                        \
	VPSLLDQ $8, X7, X5            \
	VPSRLDQ $8, X7, X7            \
	VPXOR   X5, X6, X6            \
	VPXOR   X7, X8, X8            \
	VPCLMULQDQ $0x01, X6, X14, X5 \
	VPSHUFD $78, X6, X6           \
	VPXOR   X5, X6, X6            \
	VPCLMULQDQ $0x01, X6, X14, X5 \
	VPSHUFD $78, X6, X6           \
	VPXOR   X5, X8, X8            \
	VPXOR   X6, X8, X11

// ENCRYPT makes the key stream of eight blocks in Y0 to Y3, without the last
// round.
#define ENCRYPT  \
	COUNT    \
	ROUND(1) \
	ROUND(2) \
	ROUND(3) \
	ROUND(4) \
	ROUND(5) \
	ROUND(6) \
	ROUND(7) \
	ROUND(8) \
	ROUND(9)

// HASHED is ENCRYPT, and adds the eight blocks from off(base) on to the hash. The
// multiplication that needs the hash so far comes last.
#define HASHED(off, base)        \
	COUNT                    \
	LOAD((off+32)(base), 32) \
	ROUND(1)                 \
	FIRST(32)                \
	ROUND(2)                 \
	LOAD((off+64)(base), 64) \
	ROUND(3)                 \
	NEXT(64)                 \
	ROUND(4)                 \
	LOAD((off+96)(base), 96) \
	ROUND(5)                 \
	NEXT(96)                 \
	ROUND(6)                 \
	LOAD(off(base), 0)       \
	VPXOR Y11, Y9, Y9        \
	ROUND(7)                 \
	NEXT(0)                  \
	ROUND(8)                 \
	HALVES                   \
	ROUND(9)                 \
	REDUCE

// CRYPT adds the key stream to 128 bytes at SI, stores the sum at R8, and goes
// on to the next ones.
#define CRYPT                  \
	VPXOR   0(SI), Y0, Y0  \
	VPXOR   32(SI), Y1, Y1 \
	VPXOR   64(SI), Y2, Y2 \
	VPXOR   96(SI), Y3, Y3 \
	VMOVDQU Y0, 0(R8)      \
	VMOVDQU Y1, 32(R8)     \
	VMOVDQU Y2, 64(R8)     \
	VMOVDQU Y3, 96(R8)     \
	ADDQ    $128, SI       \
	ADDQ    $128, R8       \
	SUBQ    $128, CX

#define LOADHASH                \
	MOVQ    hash+16(FP), R9 \
	VMOVDQU (R9), X11       \
	VPSHUFB X12, X11, X11

#define STOREHASH             \
	VPSHUFB X12, X11, X11 \
	VMOVDQU X11, (R9)

// func sealBlocks(k *key, counter, hash *block, dst, src *byte, n int)
TEXT ·sealBlocks(SB), NOSPLIT, $0-48
	MOVQ k+0(FP), DI
	MOVQ counter+8(FP), AX
	MOVQ dst+24(FP), R8
	MOVQ src+32(FP), SI
	MOVQ n+40(FP), CX
	BEGIN
	COUNTER((AX))
	LOADHASH

	// What is hashed is the result of the turn before.
	ENCRYPT
	LAST(sealFirst)
	CRYPT
	JZ sealEnd

sealNext:
	HASHED(-128, R8)
	LAST(sealLast)
	CRYPT
	JNZ sealNext

sealEnd:
	LOAD(-96(R8), 32)
	FIRST(32)
	LOAD(-64(R8), 64)
	NEXT(64)
	LOAD(-32(R8), 96)
	NEXT(96)
	LOAD(-128(R8), 0)
	VPXOR Y11, Y9, Y9
	NEXT(0)
	HALVES
	REDUCE
	STOREHASH
	VZEROUPPER
	RET

// func openBlocks(k *key, counter, hash *block, dst, src *byte, n int)
TEXT ·openBlocks(SB), NOSPLIT, $0-48
	MOVQ k+0(FP), DI
	MOVQ counter+8(FP), AX
	MOVQ dst+24(FP), R8
	MOVQ src+32(FP), SI
	MOVQ n+40(FP), CX
	BEGIN
	COUNTER((AX))
	LOADHASH

openNext:
	HASHED(0, SI)
	LAST(openLast)
	CRYPT
	JNZ openNext
	STOREHASH
	VZEROUPPER
	RET

// func stream(k *key, counter *block, dst *[128]byte)
TEXT ·stream(SB), NOSPLIT, $0-24
	MOVQ k+0(FP), DI
	MOVQ counter+8(FP), AX
	MOVQ dst+16(FP), R8
	BEGIN
	COUNTER((AX))
	ENCRYPT
	LAST(streamLast)
	VMOVDQU Y0, 0(R8)
	VMOVDQU Y1, 32(R8)
	VMOVDQU Y2, 64(R8)
	VMOVDQU Y3, 96(R8)
	VZEROUPPER
	RET

// func hashBlocks(k *key, p *byte, hash *block, n int)
TEXT ·hashBlocks(SB), NOSPLIT, $0-32
	MOVQ k+0(FP), DI
	MOVQ p+8(FP), SI
	MOVQ n+24(FP), CX
	BEGIN
	LOADHASH
	VPXOR X6, X6, X6
	VPXOR X7, X7, X7
	VPXOR X8, X8, X8

	// The first of n blocks is multiplied by H^n, the last one by H.
	MOVQ $8, AX
	SUBQ CX, AX
	SHLQ $4, AX
	ADDQ AX, DI

hashNext:
	VMOVDQU (SI), X9
	VMOVDQU POWERS(DI), X10
	VPSHUFB X12, X9, X9
	VPXOR   X11, X9, X9
	VPXOR   X11, X11, X11
	NEXT(0) // of one block: the upper halves of Y9 and Y10 are 0
	ADDQ    $16, SI
	ADDQ    $16, DI
	DECQ    CX
	JNZ     hashNext
	HALVES
	REDUCE
	STOREHASH
	VZEROUPPER
	RET

// func subWord(w uint32) uint32
TEXT ·subWord(SB), NOSPLIT, $0-12
	MOVL w+0(FP), AX
	VMOVD AX, X0
	VPSHUFD $0, X0, X0
	VAESKEYGENASSIST $0, X0, X0
	VMOVD X0, AX
	MOVL AX, ret+8(FP)
	RET

// func features() uint32
TEXT ·features(SB), NOSPLIT, $0-4
	MOVL $0, AX
	CPUID
	CMPL AX, $7
	JB   none
	MOVL $7, AX
	MOVL $0, CX
	CPUID
	MOVL CX, ret+0(FP)
	RET

none:
	MOVL $0, ret+0(FP)
	RET
