/* system.h - the declarations that seqtx's headers use from Microsoft's C library and
   <windows.h>. tests/build/platforms.sh replaces all system headers by this file, so that
   clang reads seqtx as Microsoft's compiler would. Nothing here is linked. */
#ifndef SEQTX_TESTS_MSVC_SYSTEM_H
#define SEQTX_TESTS_MSVC_SYSTEM_H
#ifdef __cplusplus
extern "C" {
  #define NULL 0
#else
  #define NULL ((void *)0)
#endif
#ifdef _M_IX86
typedef unsigned int size_t, uintptr_t, DWORD_PTR;
typedef int ptrdiff_t, intptr_t;
  #define SIZE_MAX 0xffffffffu
#else
typedef unsigned long long size_t, uintptr_t, DWORD_PTR;
typedef long long ptrdiff_t, intptr_t;
  #define SIZE_MAX 0xffffffffffffffffull
#endif
typedef unsigned long long uint64_t, uintmax_t;
typedef long long int64_t, intmax_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned uint32_t;
typedef char *va_list;

typedef struct {
    unsigned control, status;
} fenv_t;

#define FE_DFL_ENV ((const fenv_t *)0)
int fegetenv(fenv_t *env);
int fesetenv(const fenv_t *env);
#define UINT64_MAX             0xffffffffffffffffull
#define INT64_MAX              0x7fffffffffffffffll
#define INT64_MIN              (-INT64_MAX - 1)
#define UINT32_MAX             0xffffffffu
#define INT32_MAX              0x7fffffff
#define INT32_MIN              (-INT32_MAX - 1)
#define UINT16_MAX             0xffff
#define UINT8_MAX              0xff
#define INT_MAX                0x7fffffff
#define INT_MIN                (-INT_MAX - 1)
#define UINT_MAX               0xffffffffu
#define LONG_MAX               0x7fffffffL
#define ULONG_MAX              0xffffffffUL
#define LLONG_MAX              0x7fffffffffffffffll
#define CHAR_BIT               8
#define FLT_MAX                3.402823466e+38f
#define FLT_MIN                1.175494351e-38f
#define FLT_EPSILON            1.192092896e-07f
#define DBL_MAX                1.7976931348623158e+308
#define DBL_MIN                2.2250738585072014e-308
#define DBL_EPSILON            2.2204460492503131e-016
#define FLT_EVAL_METHOD        0
#define HUGE_VAL               ((double)(1e+300 * 1e+300))
#define HUGE_VALF              ((float)(1e+300 * 1e+300))
#define INFINITY               ((float)(1e+300 * 1e+300))
#define NAN                    (-(float)(INFINITY * 0.0f))
#define va_start(ap, last)     ((void)(ap = (va_list) & (last)))
#define va_arg(ap, type)       (*(type *)((ap += 8) - 8))
#define va_copy(to, from)      ((void)((to) = (from)))
#define va_end(ap)             ((void)(ap))
#define offsetof(type, member) ((size_t) & ((type *)0)->member)
#define assert(x)              ((void)0)

void *malloc(size_t), *calloc(size_t, size_t), *realloc(void *, size_t);
void free(void *), qsort(void *, size_t, size_t, int (*)(const void *, const void *));
long strtol(const char *, char **, int);
unsigned long strtoul(const char *, char **, int);
long long strtoll(const char *, char **, int);
unsigned long long strtoull(const char *, char **, int);
double strtod(const char *, char **), atof(const char *);
char *getenv(const char *);
void *memcpy(void *, const void *, size_t), *memmove(void *, const void *, size_t),
    *memset(void *, int, size_t);
int memcmp(const void *, const void *, size_t), strcmp(const char *, const char *),
    strncmp(const char *, const char *, size_t);
size_t strlen(const char *), strspn(const char *, const char *),
    strcspn(const char *, const char *);
char *strcpy(char *, const char *), *strcat(char *, const char *),
    *strncpy(char *, const char *, size_t), *strerror(int);
#ifdef __cplusplus
}

/* In C++, Microsoft's library has a const and a non-const overload of each of these. */
const char *strchr(const char *, int);
char *strchr(char *, int);
const char *strrchr(const char *, int);
char *strrchr(char *, int);
const char *strstr(const char *, const char *);
char *strstr(char *, const char *);
const void *memchr(const void *, int, size_t);
void *memchr(void *, int, size_t);
extern "C" {
#else
char *strchr(const char *, int), *strrchr(const char *, int), *strstr(const char *, const char *);
void *memchr(const void *, int, size_t);
#endif
double sqrt(double), exp(double), log(double), pow(double, double), tanh(double), cos(double),
    sin(double), fabs(double);
double floor(double), ceil(double), erf(double), erfc(double), log2(double), log1p(double),
    expm1(double), fmod(double, double);
double ldexp(double, int), frexp(double, int *), lgamma(double), nearbyint(double), rint(double),
    fma(double, double, double);
double acos(double), fmax(double, double), fmin(double, double);
float sqrtf(float), expf(float), logf(float), powf(float, float), tanhf(float), cosf(float),
    sinf(float), fabsf(float), floorf(float);
float ceilf(float), erff(float), erfcf(float), fmaf(float, float, float), log1pf(float),
    nearbyintf(float);
typedef struct FILE_ FILE;
#define SEEK_SET 0
#define SEEK_END 2
#define EOF      (-1)
FILE *fopen(const char *, const char *);
int fclose(FILE *), fflush(FILE *), ferror(FILE *), feof(FILE *), fseek(FILE *, long, int),
    remove(const char *), _fileno(FILE *), _commit(int), _getpid(void),
    _open(const char *, int, ...), _close(int);
FILE *_fdopen(int, const char *);
#define _O_WRONLY    1
#define _O_CREAT     0x100
#define _O_EXCL      0x400
#define _O_BINARY    0x8000
#define _O_NOINHERIT 0x80
#define _S_IREAD     0x100
#define _S_IWRITE    0x80
long ftell(FILE *);
size_t fread(void *, size_t, size_t, FILE *), fwrite(const void *, size_t, size_t, FILE *);
int snprintf(char *, size_t, const char *, ...), vsnprintf(char *, size_t, const char *, va_list),
    sscanf(const char *, const char *, ...);
int *_errno(void);
#define errno  (*_errno())
#define ENOENT 2
#define EINTR  4
#define EIO    5
#define ENOMEM 12
#define EACCES 13
#define EEXIST 17
#define EINVAL 22
#define ENOSPC 28
#define ERANGE 34
unsigned _mm_getcsr(void);
void _mm_setcsr(unsigned);

/* <windows.h>. WINAPI selects a different calling convention in 32-bit code. */
#ifdef _M_IX86
  #define WINAPI __stdcall
#else
  #define WINAPI
#endif
typedef void *HANDLE;
typedef int BOOL;
typedef unsigned long DWORD;
typedef long LONG;

typedef struct {
    void *p;
} SRWLOCK, CONDITION_VARIABLE;

typedef union {
    struct {
        DWORD lo;
        LONG hi;
    } u;

    long long QuadPart;
} LARGE_INTEGER;

typedef DWORD(WINAPI *LPTHREAD_START_ROUTINE)(void *);
#define INFINITE 0xffffffffu
LONG InterlockedCompareExchange(LONG volatile *, LONG, LONG),
    InterlockedExchange(LONG volatile *, LONG), InterlockedExchangeAdd(LONG volatile *, LONG);
void WINAPI AcquireSRWLockExclusive(SRWLOCK *);
void WINAPI ReleaseSRWLockExclusive(SRWLOCK *);
void WINAPI InitializeSRWLock(SRWLOCK *);
void WINAPI InitializeConditionVariable(CONDITION_VARIABLE *);
void WINAPI WakeConditionVariable(CONDITION_VARIABLE *);
BOOL WINAPI SleepConditionVariableSRW(CONDITION_VARIABLE *, SRWLOCK *, DWORD, DWORD);
BOOL WINAPI QueryPerformanceCounter(LARGE_INTEGER *);
BOOL WINAPI QueryPerformanceFrequency(LARGE_INTEGER *);
BOOL WINAPI CloseHandle(HANDLE);
HANDLE WINAPI CreateThread(void *, size_t, LPTHREAD_START_ROUTINE, void *, DWORD, DWORD *);
HANDLE WINAPI GetCurrentProcess(void);
DWORD WINAPI GetCurrentProcessId(void);
DWORD WINAPI WaitForSingleObject(HANDLE, DWORD);
BOOL WINAPI GetProcessAffinityMask(HANDLE, DWORD_PTR *, DWORD_PTR *);
BOOL WINAPI MoveFileExA(const char *, const char *, DWORD);
#define YieldProcessor() ((void)0)
#ifdef __cplusplus
}
#endif
#endif
