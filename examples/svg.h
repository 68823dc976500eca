/* svg.h - draws the pictures of build/plot and of train_par --picture: numbers, elements,
   axes with round tick values, stacked areas

   Use:      #include "svg.h"     includes the parts of train.h that it uses
   Link:     -lm. C99 and POSIX.1-2008.
   License:  MIT or public domain, your choice; see LICENSE.

   A picture is built in a tr_buf and written when it is complete. Numbers are not
   converted by the C library, because in some locales it uses a comma as the decimal
   point.

   Sections, marked with >> in the code: numbers, elements, axes, shares */

#ifndef SEQTX_EXAMPLES_SVG_H
#define SEQTX_EXAMPLES_SVG_H

#include "train/files.h"
#include "train/json.h"


// >>numbers

/* Writes x to `out` with up to `decimals` digits (at most 9) after the decimal point,
   without trailing zeros, and returns `out`. */
TR_DEF const char *svg_number(char out[32], double x, int decimals) {
    uint64_t scale = 1, v = 1000000000000000000u;
    int n, k;
    if (decimals > 9) decimals = 9;
    for (k = 0; k < decimals; k++) scale *= 10;
    if (isnan(x)) x = 0;
    if (fabs(x) * (double)scale < 1e18) v = (uint64_t)(fabs(x) * (double)scale + 0.5);
    n = snprintf(out, 32, "%s%" PRIu64, x < 0 && v ? "-" : "", v / scale);
    if (v % scale) {
        n += snprintf(out + n, 32 - (size_t)n, ".%0*" PRIu64, decimals, v % scale);
        while (out[n - 1] == '0') n--;
        out[n] = 0;
    }
    return out;
}

/* Appends the decimal digits at p to *m, without those beyond the precision of a double.
   *kept and *dropped receive the numbers of appended and omitted digits. Returns the
   position after the digits. */
TR_DEF const char *svg_digits(const char *p, double *m, int *kept, int *dropped) {
    for (*kept = *dropped = 0; *p >= '0' && *p <= '9'; p++) {
        if (*m < 1e17) {
            *m = 10 * *m + (*p - '0');
            ++*kept;
        } else {
            ++*dropped;
        }
    }
    return p;
}

/* Returns m 10^e. For a negative e, divides by 10^-e, because 10^-e is exact, whereas
   10^e is not: 3 / 10 is 0.3, but 3 * 0.1 is not. */
TR_DEF double svg_times_power(double m, int e) {
    if (e >= 0) return m * pow(10, e);
    if (e >= -300) return m / pow(10, -e);
    return m / pow(10, 300) / pow(10, -e - 300);
}

/* Reads the JSON number at p. null, and a number that does not fit in a double, become
   NaN. Returns the position after the number, or NULL if there is no number. */
TR_DEF const char *svg_read(const char *p, double *x) {
    double m = 0;
    int e, kept, dropped, digits, exponent = 0, minus = *p == '-', down;
    *x = (double)NAN;
    if (strncmp(p, "null", 4) == 0) return p + 4;
    p = svg_digits(p + minus, &m, &kept, &dropped);
    digits = kept + dropped;
    e = dropped;
    if (*p == '.') {
        p = svg_digits(p + 1, &m, &kept, &dropped);
        digits += kept + dropped;
        e -= kept;
    }
    if (!digits) return NULL;

    if (*p == 'e' || *p == 'E') {
        p++;
        down = *p == '-';
        p += down || *p == '+';
        if (*p < '0' || *p > '9') return NULL;
        for (; *p >= '0' && *p <= '9'; p++)
            if (exponent < 10000) exponent = 10 * exponent + (*p - '0');
        e += down ? -exponent : exponent;
    }
    m = svg_times_power(m, e);
    if (isfinite(m)) *x = minus ? -m : m;
    return p;
}

/* Reads the list of numbers "[..]" at p and stores up to `capacity` of them in `out`.
   Returns the length of the whole list, or SIZE_MAX if p is not a list of numbers. */
TR_DEF size_t svg_numbers(const char *p, double *out, size_t capacity) {
    size_t n = 0;
    double x;
    if (*p++ != '[') return SIZE_MAX;
    for (p = tr_json_blank(p); *p != ']'; n++) {
        p = svg_read(p, &x);
        if (!p) return SIZE_MAX;
        if (n < capacity) out[n] = x;
        p = tr_json_blank(p);
        if (*p != ',' && *p != ']') return SIZE_MAX;
        if (*p == ',') p = tr_json_blank(p + 1);
    }
    return n;
}


// >>elements

/* Appends text as the content of an XML element. Invalid UTF-8 and control characters,
   which XML does not allow, become U+FFFD. */
TR_DEF void svg_escaped(tr_buf *b, const char *text) {
    static const char special[] = "<>&\"";
    static const char *const entity[] = {"&lt;", "&gt;", "&amp;", "&quot;"};
    const unsigned char *s = (const unsigned char *)text;
    const char *at;
    while (*s) {
        size_t n = tr_utf8(s);
        at = strchr(special, *s);
        if (n == 0 || *s < 0x20 || *s == 0x7F) {
            tr_buf_puts(b, "\357\277\275");
            n = 1;
        } else if (at != NULL) {
            tr_buf_puts(b, entity[at - special]);
        } else {
            tr_buf_put(b, s, n);
        }
        s += n;
    }
}

/* Appends fmt. In it, %n is a double with two decimals, %p a double with one decimal
   (to keep the points of long lines short), %s text that is copied unchanged, and %t
   text that is escaped. */
TR_DEF void svg_add(tr_buf *b, const char *fmt, ...) {
    char number[32];
    va_list args;
    va_start(args, fmt);
    for (; *fmt; fmt++) {
        if (*fmt != '%') {
            tr_buf_put(b, fmt, 1);
            continue;
        }
        switch (*++fmt) {
        case 'n': tr_buf_puts(b, svg_number(number, va_arg(args, double), 2)); break;
        case 'p': tr_buf_puts(b, svg_number(number, va_arg(args, double), 1)); break;
        case 's': tr_buf_puts(b, va_arg(args, const char *)); break;
        default: svg_escaped(b, va_arg(args, const char *)); break;
        }
    }
    va_end(args);
}

/* Appends a text element. `look` is "" or contains more attributes, each preceded by a
   blank. */
TR_DEF void svg_text(tr_buf *b, double x, double y, const char *look, const char *text) {
    svg_add(b, "<text x=\"%n\" y=\"%n\"%s>%t</text>\n", x, y, look, text);
}

/* Writes a picture that consists of the elements in `body`. Replaces a regular file
   (tr_replace), and writes to terminals, pipes and standard output ("-") directly. Sets
   err and returns 0 on failure. */
TR_DEF int svg_save(const char *path, const char *title, double width, double height,
                    const tr_buf *body, char *err, size_t size) {
    tr_buf b;
    struct stat st;
    int fd, ok;
    memset(&b, 0, sizeof b);
    svg_add(&b,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" "
            "width=\"%n\" height=\"%n\" viewBox=\"0 0 %n %n\" "
            "font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\" "
            "font-size=\"11\" fill=\"#333\">\n"
            "<title>%t</title>\n"
            "<rect width=\"%n\" height=\"%n\" fill=\"#fff\"/>\n",
            width, height, width, height, title, width, height);
    if (body->n) tr_buf_put(&b, body->s, body->n);
    tr_buf_puts(&b, "</svg>\n");
    if (b.oom || body->oom) {
        tr_buf_free(&b);
        return tr_fail(err, size, "%s: out of memory: cannot write the picture", path);
    }

    if (strcmp(path, "-") != 0 && (stat(path, &st) != 0 || S_ISREG(st.st_mode))) {
        ok = tr_replace(path, b.s, b.n, err, size);
    } else {
        fd = strcmp(path, "-") ? open(path, O_WRONLY | O_CLOEXEC) : dup(1);
        ok = fd >= 0 && tr_write_all(fd, b.s, b.n);
        ok = fd >= 0 && close(fd) == 0 && ok;
        if (!ok) tr_fail(err, size, "%s: cannot write: %s", path, strerror(errno));
    }
    tr_buf_free(&b);
    return ok;
}


// >>axes

/* Maps values from lo to hi to the coordinates `from` to `to`. The map is linear, or
   logarithmic if log is 1, which requires lo > 0. */
typedef struct svg_axis {
    double lo, hi, from, to;
    int    log;
} svg_axis;

/* Returns the coordinate of a value. Values far outside the axis are moved closer to
   it: they are clipped anyway, and the lines to them hardly change direction. */
TR_DEF double svg_at(const svg_axis *a, double v) {
    double t = -1;
    if (!a->log) t = (v - a->lo) / (a->hi - a->lo);
    else if (v > 0) t = log(v / a->lo) / log(a->hi / a->lo);
    if (t < -1) t = -1;
    if (t > 2) t = 2;
    return a->from + t * (a->to - a->from);
}

enum { SVG_TICKS = 16 };

/* Finds the values m 10^k on a logarithmic axis, for each m in `list` (up to 8 values;
   a 0 ends a shorter list) and each integer k. Returns the number of values found, at
   most SVG_TICKS. */
TR_DEF size_t svg_log_ticks(const svg_axis *a, const double list[8], double tick[SVG_TICKS]) {
    double slack = 1e-9 * (a->hi - a->lo);
    int decade = (int)floor(log10(a->lo));
    size_t n = 0, i;
    for (; pow(10, decade) <= a->hi; decade++) {
        for (i = 0; i < 8 && list[i] > 0; i++) {
            double v = list[i] * pow(10, decade);
            if (v < a->lo - slack || v > a->hi + slack) continue;
            if (n < SVG_TICKS) tick[n] = v;
            n++;
        }
    }
    if (n > SVG_TICKS) n = SVG_TICKS;
    return n;
}

/* Finds about `target` round values on the axis and returns their number. *step receives
   the distance between adjacent values (on a logarithmic axis, the smallest distance). */
TR_DEF size_t svg_ticks(const svg_axis *a, double target, double tick[SVG_TICKS], double *step) {
    static const double list[3][8] = {{1}, {1, 2, 5}, {1, 1.5, 2, 3, 4, 5, 6, 8}};
    static const double factor[4] = {1, 2, 5, 10}, limit[3] = {1.0001, 2.0001, 5.0001};
    double slack = 1e-9 * (a->hi - a->lo), base, raw, k;
    size_t n, i;
    for (i = 0; a->log && i < 3; i++) {
        n = svg_log_ticks(a, list[i], tick);
        if ((double)n < target - 1) continue;
        *step = tick[0];
        return n;
    }

    /* the smallest step among 1, 2, 5 and 10 times a power of ten with at most `target`
       values */
    raw = (a->hi - a->lo) / (target < SVG_TICKS - 1 ? target : SVG_TICKS - 1);
    base = pow(10, floor(log10(raw)));
    for (i = 0; i < 3 && !(raw <= limit[i] * base);) i++;
    *step = base * factor[i];

    k = ceil(a->lo / *step - 1e-9);
    for (n = 0; n < SVG_TICKS && k * *step <= a->hi + slack; k++) tick[n++] = k * *step;
    return n;
}

/* Writes the label of a tick, such as 20k, 1.5M or 2e-4, with as many digits as are
   required to distinguish ticks that are `step` apart. */
TR_DEF const char *svg_tick_text(char out[32], const svg_axis *a, double v, double step,
                                 double largest) {
    static const char *const suffix[] = {"", "k", "M", "G", "T"};
    int at = (int)floor(log10(a->log ? v / 10 : step) + 1e-6), k = 0;
    if (v == 0) return strcpy(out, "0");
    if (a->log) largest = v;
    if (step < 1e-3 && largest < 0.0101) {
        int e = (int)floor(log10(fabs(v)) + 1e-9), n;
        svg_number(out, v * pow(10, -e), e > at ? e - at : 0);
        n = (int)strlen(out);
        snprintf(out + n, 32 - (size_t)n, "e%d", e);
        return out;
    }
    while (largest >= 1e4 && k < 4) {
        largest /= 1000;
        v /= 1000;
        at -= 3;
        k++;
    }
    svg_number(out, v, at < 0 ? -at : 0);
    if (k) strcat(out, suffix[k]);
    return out;
}

/* Appends the tick labels below a panel whose lower edge is at y. */
TR_DEF void svg_below(tr_buf *b, const svg_axis *x, double y, double target) {
    double tick[SVG_TICKS], step;
    size_t n = svg_ticks(x, target, tick, &step), i;
    static const char *const look[3] = {"", " text-anchor=\"start\"", " text-anchor=\"end\""};
    /* in a narrow panel, align the outermost labels inward, away from the labels of the
       next panel */
    int narrow = x->to - x->from < 200;
    char text[32];
    svg_add(b, "<g text-anchor=\"middle\" fill=\"#555\">\n");
    for (i = 0; i < n; i++) {
        double at = svg_at(x, tick[i]);
        int side = 0;
        if (narrow && at < x->from + 5) side = 1;
        else if (narrow && at > x->to - 12) side = 2;
        svg_tick_text(text, x, tick[i], step, tick[n - 1]);
        svg_text(b, at, y + 13, look[side], text);
    }
    svg_add(b, "</g>\n");
}

/* Appends an empty panel: grid lines at the ticks, tick labels, a title above, and a
   caption at the lower right. */
TR_DEF void svg_frame(tr_buf *b, const svg_axis *x, const svg_axis *y, const char *title,
                      const char *below) {
    double tick[SVG_TICKS], step, w = x->to - x->from, h = y->from - y->to;
    size_t n, i;
    char text[32];
    svg_text(b, x->from, y->to - 7, " font-size=\"12\" font-weight=\"bold\"", title);
    n = svg_ticks(x, w > 300 ? 7 : 4, tick, &step);
    svg_add(b, "<path stroke=\"#e4e4e4\" fill=\"none\" d=\"");
    for (i = 0; i < n; i++) svg_add(b, "M%n %nV%n", svg_at(x, tick[i]), y->from, y->to);
    n = svg_ticks(y, h > 150 ? 6 : 4, tick, &step);
    for (i = 0; i < n; i++) svg_add(b, "M%n %nH%n", x->from, svg_at(y, tick[i]), x->to);
    svg_add(b, "\"/>\n<g text-anchor=\"end\" fill=\"#555\">\n");
    for (i = 0; i < n; i++)
        svg_text(b, x->from - 5, svg_at(y, tick[i]) + 4, "",
                 svg_tick_text(text, y, tick[i], step, tick[n - 1]));
    svg_text(b, x->to, y->from + 26, "", below);
    svg_add(b, "</g>\n");
    svg_below(b, x, y->from, w > 300 ? 7 : 4);
    svg_add(b,
            "<rect x=\"%n\" y=\"%n\" width=\"%n\" height=\"%n\" fill=\"none\" stroke=\"#bbb\"/>\n",
            x->from, y->to, w, h);
}


// >>shares

/* The colours of attention, feed-forward and identity, which colour-blind readers can
   distinguish. */
static const char *const svg_share[3] = {"#0072B2", "#E69F00", "#D9D9D9"};

/* Appends the area between the lower edge and the sum of the first k probabilities of
   block l. Skips steps that are less than one pixel from the previous one. */
TR_DEF void svg_area(tr_buf *b, const double *data, size_t n, size_t L, size_t l, size_t k,
                     const svg_axis *x, const svg_axis *y) {
    size_t i, j;
    double last = -1e9, here = 0, sum;
    svg_add(b, "<polygon fill=\"%s\" points=\"%p,%p", svg_share[k - 1], svg_at(x, data[0]),
            y->from);
    for (i = 0; i < n; i++) {
        const double *row = data + i * (1 + 3 * L);
        here = svg_at(x, row[0]);
        if (here - last < 1 && i + 1 < n) continue;
        last = here;
        for (sum = 0, j = 0; j < k; j++) sum += row[1 + 3 * l + j];
        svg_add(b, " %p,%p", here, svg_at(y, sum));
    }
    svg_add(b, " %p,%p\"/>\n", here, y->from);
}

/* Appends one panel per block, from left to right, with the probabilities of attention,
   feed-forward and identity at each step. Each of the n rows of data contains a step
   and three probabilities for each of the L blocks. The step axis has the `lo`, `hi`
   and `log` of `steps`. Returns the total height of the panels. */
TR_DEF double svg_shares(tr_buf *b, const double *data, size_t n, size_t L,
                         const svg_axis *steps, double x0, double y0, double width) {
    const double gap = 12, h = 64;
    size_t l, columns = L < 8 ? L : 8, rows;
    double w, first, last;
    char text[32];
    if (columns < 4) columns = 4;
    rows = (L + columns - 1) / columns;
    w = (width - gap * (double)(columns - 1)) / (double)columns;
    svg_add(b,
            "<text x=\"%n\" y=\"%n\" font-size=\"12\">"
            "<tspan font-weight=\"bold\">probabilities of each block</tspan> by step: "
            "<tspan fill=\"%s\">attention</tspan>, "
            "<tspan fill=\"#B27A00\">feed-forward</tspan>, "
            "<tspan fill=\"#777\">identity</tspan></text>\n",
            x0, y0 + 12, svg_share[0]);
    for (l = 0; l < L && n; l++) {
        svg_axis x = *steps, y = {0, 1, 0, 0, 0};
        x.from = x0 + (double)(l % columns) * (w + gap);
        x.to = x.from + w;
        y.from = y0 + 36 + (double)(l / columns) * (h + 20) + h;
        y.to = y.from - h;
        snprintf(text, sizeof text, "block %u", (unsigned)(l + 1));
        svg_text(b, x.from, y.to - 4, "", text);
        first = svg_at(&x, data[0]);
        last = svg_at(&x, data[(n - 1) * (1 + 3 * L)]);
        svg_add(b, "<rect x=\"%n\" y=\"%n\" width=\"%n\" height=\"%n\" fill=\"%s\"/>\n",
                first, y.to, last - first, h, svg_share[2]);
        svg_area(b, data, n, L, l, 2, &x, &y);
        svg_area(b, data, n, L, l, 1, &x, &y);
        if (l + columns >= L) svg_below(b, &x, y.from, 3);
    }
    return 36 + (double)rows * (h + 20) + 4;
}

#endif /* SEQTX_EXAMPLES_SVG_H */
