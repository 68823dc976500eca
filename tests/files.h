/* files.h - files of a test, in a directory that exists only while the test runs. Does
   not depend on seqtx.h. */
#ifndef STX_TEST_FILES_H
#define STX_TEST_FILES_H
#include "test.h"
#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

static char dir[512];   /* the directory that holds all files of the test */

/* Creates `dir`. On failure, prints the reason and the program's last output line. */
static int dir_create(const char *name) {
    const char *tmp = getenv("TMPDIR");
    int k;
    for (k = 0; k < 100; k++) {
        snprintf(dir, sizeof dir, "%.400s/seqtx_%.40s.%ld.%d", tmp && *tmp ? tmp : "/tmp", name,
                 (long)getpid(), k);
        if (mkdir(dir, 0700) == 0) return 1;
        if (errno != EEXIST) break;
    }
    printf("cannot create the directory %s: %s\n0 passed, 1 failed\n", dir, strerror(errno));
    return 0;
}

/* Returns the path of a file in `dir`, valid for the next 255 calls. */
static const char *in_dir(const char *name) {
    static char path[256][1024];
    static int k;
    char *out = path[k++ % 256];
    snprintf(out, sizeof path[0], "%.500s/%.500s", dir, name);
    return out;
}

static void put_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!EXPECT(f != NULL)) return;
    EXPECT(fwrite(data, 1, n, f) == n);
    EXPECT(fclose(f) == 0);
}

/* Returns the content of a file, followed by a zero byte and valid until the next call,
   or NULL if the file cannot be opened. *n receives the length; n may be NULL. */
static char *get_file(const char *path, size_t *n) {
    static char text[1 << 16];
    FILE *f = fopen(path, "rb");
    size_t k = 0;
    if (f != NULL) {
        k = fread(text, 1, sizeof text - 1, f);
        fclose(f);
    }
    text[k] = 0;
    if (n != NULL) *n = k;
    return f != NULL ? text : NULL;
}

/* Returns the number of entries of a directory whose names contain `part`, or -1 if it
   cannot be read. */
static int dir_entries(const char *path, const char *part) {
    DIR *d = opendir(path);
    struct dirent *e;
    int n = 0;
    if (d == NULL) return -1;
    while ((e = readdir(d)) != NULL) n += strstr(e->d_name, part) != NULL;
    closedir(d);
    return n;
}

static void remove_tree(const char *path) {
    DIR *d = opendir(path);
    struct dirent *e;
    char below[1024];
    while (d != NULL && (e = readdir(d)) != NULL) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(below, sizeof below, "%.500s/%.400s", path, e->d_name);
        if (unlink(below) != 0) remove_tree(below);
    }
    if (d != NULL) closedir(d);
    rmdir(path);
}
#endif
