#include "textflag.h"

// FOLD moves the four times 16 bytes in acc on as m says and adds the 64 bytes at
// mem. It overwrites Z8.
#define FOLD(m, mem, acc) \
	VPCLMULQDQ $0x11, m, acc, Z8   \
	VPCLMULQDQ $0x00, m, acc, acc  \
	VPTERNLOGQ $0x96, mem, Z8, acc // XOR of all three

// FOLD256 moves 256 bytes on to those at SI.
#define FOLD256 \
	FOLD(Z10, 0(SI), Z0)   \
	FOLD(Z10, 64(SI), Z1)  \
	FOLD(Z10, 128(SI), Z2) \
	FOLD(Z10, 192(SI), Z3) \
	ADDQ $256, SI          \
	SUBQ $256, CX

// func foldBlocks(crc uint32, p *byte, n int, m *moves) uint32
// n is 64 or more.
TEXT ·foldBlocks(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ p+8(FP), SI
	MOVQ n+16(FP), CX // bytes from SI on
	MOVQ m+24(FP), DI

	// The CRC so far is added to the first four bytes.
	NOTL   AX
	VMOVD  AX, X9
	VPXORQ (SI), Z9, Z0
	VBROADCASTI32X4 48(DI), Z13 // 64 bytes on
	CMPQ   CX, $256
	JB     one

	// Four registers hide that a multiplication takes longer than the next may
	// start.
	VMOVDQU64       64(SI), Z1
	VMOVDQU64       128(SI), Z2
	VMOVDQU64       192(SI), Z3
	VBROADCASTI32X4 0(DI), Z10 // 256 bytes on
	ADDQ $256, SI
	SUBQ $256, CX

	// Memory is asked for a page ahead, where the CPU's own prefetching ends.
	LEAQ -4096(CX), DX
	JMP  farther

far:
	PREFETCHT0 4096(SI)
	PREFETCHT0 4160(SI)
	PREFETCHT0 4224(SI)
	PREFETCHT0 4288(SI)
	FOLD256
	SUBQ $256, DX

farther:
	CMPQ DX, $256
	JGE  far
	JMP  nearer

near:
	FOLD256

nearer:
	CMPQ CX, $256
	JAE  near

	// The four become one: the first is moved by 192 bytes, the second by 128,
	// the third by 64.
	VBROADCASTI32X4 16(DI), Z11
	VBROADCASTI32X4 32(DI), Z12
	VPCLMULQDQ $0x11, Z11, Z0, Z4
	VPCLMULQDQ $0x00, Z11, Z0, Z0
	VPCLMULQDQ $0x11, Z12, Z1, Z5
	VPCLMULQDQ $0x00, Z12, Z1, Z1
	VPCLMULQDQ $0x11, Z13, Z2, Z6
	VPCLMULQDQ $0x00, Z13, Z2, Z2
	VPTERNLOGQ $0x96, Z4, Z3, Z0
	VPTERNLOGQ $0x96, Z5, Z6, Z1
	VPTERNLOGQ $0x96, Z1, Z2, Z0
	JMP  blocks

one:
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  blocks

block:
	FOLD(Z13, 0(SI), Z0)
	ADDQ $64, SI
	SUBQ $64, CX

blocks:
	CMPQ CX, $64
	JAE  block

	// The 0 to 63 bytes that are left are read as the end of the last 64, with
	// those before them masked: zeros in front change nothing.
	MOVQ       $-1, AX
	SHRQ       CX, AX
	NOTQ       AX
	KMOVQ      AX, K1
	VMOVDQU8.Z -64(SI)(CX*1), K1, Z1

	// Each 16 bytes of both are moved to where all bytes end.
	MOVQ       CX, AX
	SHLQ       $6, AX
	VMOVDQU64  64(DI)(AX*1), Z10
	VMOVDQU64  64(DI), Z11
	VPCLMULQDQ $0x11, Z10, Z0, Z4
	VPCLMULQDQ $0x00, Z10, Z0, Z0
	VPCLMULQDQ $0x11, Z11, Z1, Z5
	VPCLMULQDQ $0x00, Z11, Z1, Z1
	VPTERNLOGQ $0x96, Z4, Z5, Z0
	VPXORQ     Z1, Z0, Z0
	VEXTRACTI64X4 $1, Z0, Y1
	VPXOR      Y1, Y0, Y0
	VEXTRACTI128 $1, Y0, X1
	VPXOR      X1, X0, X0

	// They are divided by the polynomial: three products are the second half of
	// the quotient, the next ends with the remainder.
	VMOVDQU    4160(DI), X1
	VPCLMULQDQ $0x00, X1, X0, X2
	VPCLMULQDQ $0x10, X1, X0, X3
	VPCLMULQDQ $0x01, X1, X0, X4
	VPSRLDQ    $8, X2, X2
	VPTERNLOGQ $0x96, X3, X4, X2
	VPCLMULQDQ $0x00, 4176(DI), X2, X2
	VPEXTRD    $2, X2, AX
	VZEROUPPER
	NOTL       AX
	MOVL       AX, ret+32(FP)
	RET
