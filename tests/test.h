/* test.h - shared by all test programs. A check that fails prints its file, line and
   condition. Comparisons must be written so that they are false for NaN. The last line
   of output is "N passed, N failed". Does not depend on seqtx.h. */
#ifndef STX_TEST_H
#define STX_TEST_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A program of several files defines TEST_SHARED_COUNTS in all of them, and the counts in
   one. */
#ifdef TEST_SHARED_COUNTS
extern long test_passed, test_failed;
#else
static long test_passed, test_failed;
#endif

#define CHECK(cond, ...) \
  do { \
    if (cond) \
      test_passed++; \
    else { \
      test_failed++; \
      if (test_failed <= 40) { \
        printf("%s:%d: FAILED %s: ", __FILE__, __LINE__, #cond); \
        printf(__VA_ARGS__); \
        printf("\n"); \
      } \
    } \
  } while (0)

/* Counts a check, and prints the first 40 that fail. Returns ok. */
static inline int test_check(int ok, const char *what, const char *file, int line) {
    if (ok)
        test_passed++;
    else if (++test_failed <= 40)
        printf("%s:%d: FAILED %s\n", file, line, what);
    return ok;
}

/* A check without a message, as an expression. */
#define EXPECT(cond) test_check((cond) ? 1 : 0, #cond, __FILE__, __LINE__)

static inline void test_same(const char *got, const char *expected, const char *file, int line) {
    if (!test_check(got != NULL && !strcmp(got, expected), "texts differ", file, line))
        printf("  expected [%s]\n  got [%s]\n", expected, got ? got : "(null)");
}

/* Checks that two texts are equal. `got` may be NULL. */
#define SAME(got, expected) test_same(got, expected, __FILE__, __LINE__)

/* True if |a - b| <= tol max(1, |b|). */
#define CLOSE(a, b, tol) \
  (fabs((double)(a) - (double)(b)) <= (tol) * (fabs((double)(b)) > 1 ? fabs((double)(b)) : 1))

/* Stores a path in the build directory. The file name contains the id of this process. */
static inline void test_path(char *path, size_t capacity, const char *name) {
    const char *build = getenv("BUILD");
    snprintf(path, capacity, "%s/%s.%ld.safetensors", build && *build ? build : "build", name,
             (long)getpid());
}

/* Returns the largest |a - b| divided by the largest |b|, or by floor_ if that is
   larger. Returns infinity if a difference is not finite. */
static inline double test_error(const double *a, const double *b, size_t n, double floor_) {
    double worst = 0, top = floor_;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs(b[i]) > top) top = fabs(b[i]);
    for (i = 0; i < n; i++) {
        double e = fabs(a[i] - b[i]);
        if (!(e <= 1e300)) return HUGE_VAL;
        if (e > worst) worst = e;
    }
    return worst == 0 ? 0 : worst / top;
}

/* A deterministic generator (xorshift64) of test data in (-1,1). */
static uint64_t test_state = 88172645463325252u;

static inline double test_rand(void) {
    test_state ^= test_state << 13;
    test_state ^= test_state >> 7;
    test_state ^= test_state << 17;
    return (double)(test_state >> 11) / 4503599627370496.0 - 1;
}

/* Returns whether the text contains the pattern, in which ".." matches any characters. */
static inline int test_says(const char *text, const char *pattern) {
    char part[256];
    const char *gap;
    size_t n;
    for (;;) {
        gap = strstr(pattern, "..");
        n = gap ? (size_t)(gap - pattern) : strlen(pattern);
        if (n >= sizeof part) return 0;
        memcpy(part, pattern, n);
        part[n] = 0;
        text = strstr(text, part);
        if (!text) return 0;
        text += n;
        if (!gap) return 1;
        pattern = gap + 2;
    }
}

/* A part of a test program, selected with `test_NAME PART ..`. */
typedef struct test_part {
    const char *name;
    void (*run)(void);
} test_part;

/* Runs the parts that the command line names, or all parts if it names none. A part
   without any check fails. */
static inline void test_run(const test_part *parts, size_t count, int argc, char **argv) {
    size_t i;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (i = 0; i < count; i++) {
        long failed = test_failed, passed = test_passed;
        int k, wanted = argc < 2;
        for (k = 1; k < argc; k++) wanted |= !strcmp(argv[k], parts[i].name);
        if (!wanted) continue;
        parts[i].run();
        CHECK(test_passed > passed, "%s: checks nothing", parts[i].name);
        if (test_failed > failed) printf("%s: %ld failed\n", parts[i].name, test_failed - failed);
    }
}

static inline int test_end(void) {
    printf("%ld passed, %ld failed\n", test_passed, test_failed);
    return test_failed || !test_passed;
}
#endif
