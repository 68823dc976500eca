/* hostile.h - macros that headers of other projects define. form.sh includes it before
   the library, which must still compile. No expansion of these macros compiles. */
#ifndef SEQTX_TESTS_HOSTILE_H
#define SEQTX_TESTS_HOSTILE_H

#include <math.h>       /* before the macros that are named like its functions */

#define HOSTILE ))) a macro of another header is in the way
#define HOSTILE_CALL(...) HOSTILE

/* stb_vorbis.c (L, C, R), complex.h (I), Arduino (F, B1): any capital letter */
#define A HOSTILE
#define B HOSTILE
#define C HOSTILE
#define D HOSTILE
#define E HOSTILE
#define F(x) HOSTILE
#define G HOSTILE
#define H HOSTILE
#define I HOSTILE
#define J HOSTILE
#define K HOSTILE
#define L HOSTILE
#define M HOSTILE
#define N HOSTILE
#define O HOSTILE
#define P HOSTILE
#define Q HOSTILE
#define R HOSTILE
#define S HOSTILE
#define T HOSTILE
#define U HOSTILE
#define V HOSTILE
#define W HOSTILE
#define X HOSTILE
#define Y HOSTILE
#define Z HOSTILE

/* Arduino.h, binary.h */
#define min(a, b) HOSTILE
#define max(a, b) HOSTILE
#define round(x) HOSTILE
#define constrain(x, low, high) HOSTILE
#define radians(x) HOSTILE
#define degrees(x) HOSTILE
#define sq(x) HOSTILE
#define bit(b) HOSTILE
#define bitRead(v, b) HOSTILE
#define bitSet(v, b) HOSTILE
#define bitClear(v, b) HOSTILE
#define lowByte(w) HOSTILE
#define highByte(w) HOSTILE
#define word(...) HOSTILE
#define interrupts() HOSTILE
#define B0 HOSTILE
#define B1 HOSTILE
#define B00 HOSTILE
#define B01 HOSTILE
#define PI HOSTILE
#define EULER HOSTILE
#define HIGH HOSTILE
#define LOW HOSTILE
#define INPUT HOSTILE
#define OUTPUT HOSTILE
#define CHANGE HOSTILE
#define DEFAULT HOSTILE
#define SERIAL HOSTILE

/* windows.h, wingdi.h */
#define near HOSTILE
#define far HOSTILE
#define small HOSTILE
#define hyper HOSTILE
#define interface HOSTILE
#define IN HOSTILE
#define OUT HOSTILE
#define OPTIONAL HOSTILE
#define ERROR HOSTILE
#define NO_ERROR HOSTILE
#define OPAQUE HOSTILE
#define TRANSPARENT HOSTILE
#define ABSOLUTE HOSTILE
#define RELATIVE HOSTILE
#define pascal HOSTILE

/* X.h, Xlib.h */
#define None HOSTILE
#define Status HOSTILE
#define Bool HOSTILE
#define True HOSTILE
#define False HOSTILE
#define Success HOSTILE
#define Always HOSTILE
#define Above HOSTILE
#define Below HOSTILE
#define Unsorted HOSTILE
#define GrayScale HOSTILE
#define CurrentTime HOSTILE

/* sys/sysmacros.h, Qt, Apple's AssertMacros.h, ncurses, param.h, Linux */
#define major(x) HOSTILE
#define minor(x) HOSTILE
#define emit HOSTILE
#define slots HOSTILE
#define signals HOSTILE
#define foreach HOSTILE
#define forever HOSTILE
#define check(...) HOSTILE
#define verify(...) HOSTILE
#define require(...) HOSTILE
#define move(y, x) HOSTILE
#define erase() HOSTILE
#define clear() HOSTILE
#define refresh() HOSTILE
#define timeout(d) HOSTILE
#define echo() HOSTILE
#define filter() HOSTILE
#define border(...) HOSTILE
#define likely(x) HOSTILE
#define unlikely(x) HOSTILE
#define roundup(x, y) HOSTILE
#define howmany(x, y) HOSTILE
#define swap(a, b) HOSTILE
#define step(...) HOSTILE
#define mean(...) HOSTILE
#define sum(...) HOSTILE
#define time_after(a, b) HOSTILE
#endif
