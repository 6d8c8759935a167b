#include "textflag.h"

// func sumShort(crc uint32, p *byte, n int) uint32
TEXT ·sumShort(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ p+8(FP), SI
	MOVQ n+16(FP), CX
	NOTL AX

	SUBQ $8, CX
	JLT  four

eight:
	CRC32Q (SI), AX
	ADDQ   $8, SI
	SUBQ   $8, CX
	JGE    eight

four: // CX is the number of bytes left, less 8
	TESTB  $4, CX
	JEQ    two
	CRC32L (SI), AX
	ADDQ   $4, SI

two:
	TESTB  $2, CX
	JEQ    one
	CRC32W (SI), AX
	ADDQ   $2, SI

one:
	TESTB  $1, CX
	JEQ    done
	CRC32B (SI), AX

done:
	NOTL AX
	MOVL AX, ret+24(FP)
	RET
