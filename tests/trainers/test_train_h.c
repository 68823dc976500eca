/* test_train_h.c - tests of examples/train.h: options, JSON, log, files, terminal,
   TensorBoard files, signals, formats.

       cc -std=c99 tests/trainers/test_train_h.c -o test_train_h -lm

   Prints failures and, in the last line, "N passed, N failed". test_train_h --keep DIR
   writes the event files to DIR and leaves them there, to be opened with TensorBoard. */

#define _XOPEN_SOURCE 700 /* for posix_openpt */
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

/* train.h is compiled with an fsync that only counts its calls. */
static int flushed_files, flushed_dirs;

static int counting_fsync(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0) return -1;
    if (S_ISDIR(st.st_mode))
        flushed_dirs++;
    else
        flushed_files++;
    return 0;
}

#define fsync counting_fsync
#include "../../examples/train.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include "../files.h"

static void check_holds(const char *got, const char *part, int line) {
    const int holds = got != NULL && strstr(got, part) != NULL;
    if (!test_check(holds, "another text", __FILE__, line))
        printf("  expected a text with [%s]\n  got [%s]\n", part, got ? got : "(null)");
}

#define HOLDS(got, part) check_holds(got, part, __LINE__)

static void put_text(const char *path, const char *text) {
    put_file(path, text, strlen(text));
}

static char err[TR_ERR];


// >>options

static int nlayers, nheads, adapt_span, fast, optim, literal, nothing;
static uint64_t steps, later;
static double lr, dropout, bias;
static const char *data, *prompt;

static const tr_preset presets[] = {{"enwik8_small", "a small one",
                                     "nlayers=3 lr=0.5  adapt_span optim=sgd no-fast nlayers=4 "},
                                    {"enwik8_large", "a large one", "nlayers=24 steps=100000"},
                                    TR_PRESET_END};

static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_INT("nlayers", TR_MODEL, &nlayers, 1, 100, "number of layers"),
    TR_INT("nheads", TR_MODEL, &nheads, 0, 0, "number of heads"),
    TR_FLAG("adapt-span", TR_MODEL, &adapt_span, "learn each head's span"),
    TR_FLAG("fast", TR_LOCAL, &fast, "be fast"),
    TR_REAL_OPEN("dropout", TR_FREE | TR_KEPT, &dropout, TR_OPEN_MAX, 0, 1,
                 "share of activations dropped"),
    TR_GROUP("Training"),
    TR_SIZE("steps", TR_FREE, &steps, 1, TR_INF, "optimiser steps"),
    TR_REAL_OPEN("lr", TR_FREE, &lr, TR_OPEN_MIN, 0, TR_INF, "learning rate"),
    TR_REAL("bias", TR_FIXED, &bias, 0, 0, "any number"),
    TR_CHOICE("optim", TR_FIXED, &optim, "adagrad|sgd|adam|inv_sqrt", "optimiser"),
    TR_TEXT(
        "data", TR_HINT, &data,
        "the text to learn; a rather long explanation that has to be wrapped, because it does not "
        "fit into the rest of a line of one hundred characters"),
    TR_TEXT("prompt", TR_FREE, &prompt, "what to begin with"),
    TR_SET("literal", TR_MODEL | TR_LATER, &literal, "rows|pad|free_ze", 4,
           "literal forms of the original"),
    TR_SET("nothing", TR_LOCAL, &nothing, "", 0, "this model has none"),
    TR_SIZE("later", TR_MODEL | TR_LATER, &later, 0, TR_INF, "an option of a later version"),
    TR_END};

static tr_options options = {"prog",
                             "Tests options.",
                             table,
                             presets,
                             "nlayers=8 nheads=2 fast steps=1000 lr=0.07 dropout=0.1 prompt=",
                             "The end.",
                             "",
                             NULL, NULL};

/* Sets the defaults and parses the words of `line`, which are separated by '|', so that
   values can contain blanks. */
static int parse(const char *line) {
    static char words[4096];
    char *argv[64], *p;
    int argc = 0;
    /* values left over from an earlier call, which the defaults must overwrite */
    nlayers = 77;
    adapt_span = 1;
    optim = 3;
    bias = 5;
    err[0] = 0;
    snprintf(words, sizeof words, "%s", line);
    argv[argc++] = words + sizeof words - 1;
    for (p = words; *line != 0 && argc < 63;) {
        argv[argc++] = p;
        p = strchr(p, '|');
        if (p == NULL) break;
        *p++ = 0;
    }
    argv[argc] = NULL;
    return tr_parse(&options, argc, argv, err, sizeof err);
}

static int fails_with(const char *line, const char *part) {
    if (parse(line) != 0) {
        printf("  [%s] was accepted\n", line);
        return 0;
    }
    if (strstr(err, part) == NULL) {
        printf("  [%s]: expected an error with [%s], got [%s]\n", line, part, err);
        return 0;
    }
    return 1;
}

static void test_values(void) {
    EXPECT(parse("") == 1 && nlayers == 8 && steps == 1000 && !options.preset_used[0]);
    EXPECT(parse("--nlayers|12|--lr=1e-3|--data|a b|--adapt-span") == 1);
    EXPECT(nlayers == 12 && lr == 1e-3 && adapt_span == 1);
    SAME(data, "a b");
    EXPECT(tr_given(&options, "nlayers") && tr_given(&options, "adapt_span")
           && !tr_given(&options, "nheads"));
    EXPECT(!tr_given(&options, "no-such"));
    EXPECT(parse("--adapt_span|--no_fast") == 1 && adapt_span == 1 && fast == 0);
    EXPECT(parse("--adapt-span=off|--fast=true") == 1 && adapt_span == 0 && fast == 1);
    EXPECT(parse("--nlayers=3|--nlayers=5") == 1 && nlayers == 5);
    EXPECT(parse("--nheads|-3|--bias|-1.5e+2") == 1 && nheads == -3 && bias == -150);
    EXPECT(parse("--nheads=2147483647") == 1 && nheads == INT_MAX);
    EXPECT(parse("--nheads=-2147483648") == 1 && nheads == INT_MIN);
    EXPECT(parse("--steps=18446744073709551615") == 1 && steps == UINT64_MAX);
    EXPECT(parse("--optim|adam") == 1 && optim == 2);
    EXPECT(parse("--optim=inv-sqrt") == 1 && optim == 3);
    EXPECT(parse("--dropout=0") == 1 && dropout == 0);
    EXPECT(parse("--prompt=--data|--data=x=y") == 1);
    SAME(prompt, "--data");
    SAME(data, "x=y");
    EXPECT(parse("--prompt||--data=") == 1);
    SAME(prompt, "");
    SAME(data, "");
}

/* Other names of options: of other programs, and of one letter. */
static void test_other_names(void) {
    EXPECT(parse("--n_layer|5|--n-head=3|--max_iters|7|--learning_rate=0.5") == 1);
    EXPECT(nlayers == 5 && nheads == 3 && steps == 7 && lr == 0.5);
    EXPECT(tr_given(&options, "nlayers") && tr_given(&options, "learning-rate"));
    EXPECT(parse("-p|once upon|--fast") == 1 && fast == 1);
    SAME(prompt, "once upon");
    EXPECT(parse("-p=-x") == 1);
    SAME(prompt, "-x");
    EXPECT(parse("-p|-x|--nheads|-3") == 1 && nheads == -3);
    SAME(prompt, "-x");
    EXPECT(parse("--lr|1|--lr|2") == 1 && lr == 2);
    EXPECT(parse("--learning-rate|1|--learning_rate|2") == 1 && lr == 2);
    EXPECT(parse("--literal|--no-literal-pad|--literal_rows") == 1);
    /* a set takes no value from the next option */
    EXPECT(parse("--literal|-p|x") == 1 && literal == TR_EVERY);

    EXPECT(fails_with("--lr|1|--learning_rate|2",
                      "--lr and --learning-rate are the same option: give one of them"));
    EXPECT(fails_with("-p|a|--prompt|b", "-p and --prompt are the same option"));
    EXPECT(fails_with("--max-iters|5|--max-steps|5", "--max-iters and --max-steps are the same"));
    EXPECT(fails_with("--n_layer|0", "--nlayers: expected a whole number from 1 to 100, got '0' "
                                     "(--n-layer is --nlayers)"));
    EXPECT(fails_with("-p", "--prompt: expected a text, got nothing (-p is --prompt)"));
    EXPECT(fails_with("--data|-p", "--data: expected a text, got the option '-p' (if that is the "
                                   "value, write --data=-p)"));
    EXPECT(fails_with("--no-learning-rate", "--lr is not a flag"));

    /* presets and checkpoints: the option's own name */
    EXPECT(parse("--n_layer|5|--temp|1") == 0);     /* this program has no --temperature */
    EXPECT(parse("--n_layer|5") == 1);
    {
        char *json = tr_options_json(&options, 1);
        HOLDS(json, "\"nlayers\":5,");
        EXPECT(strstr(json, "n-layer") == NULL);
        free(json);
    }
    EXPECT(tr_apply(&options, "n-layer=6", TR_FROM_ARGS, err, sizeof err) == 1 && nlayers == 6);
    {
        /* a program's own option precedes the table, and so does the first row */
        static const char *out, *model;
        static double max_lr, own_lr;
        tr_opt rows[] = {TR_REAL("lr", TR_FREE, &own_lr, 0, 1, "rate"),
                         TR_REAL("max-lr", TR_FREE, &max_lr, 0, 1, "largest rate"),
                         TR_TEXT("out", TR_LOCAL, &out, "directory"),
                         TR_TEXT("checkpoint", TR_LOCAL, &model, "file"), TR_END};
        tr_options o = {"prog", "", rows, NULL, NULL, NULL, "", NULL, NULL};
        tr_buf b;
        memset(&b, 0, sizeof b);
        EXPECT(tr_find_option(&o, "max_lr", 6) == rows + 1);
        EXPECT(tr_find_option(&o, "o", 1) == rows + 3);
        EXPECT(tr_find_option(&o, "learning_rate", 13) == rows);
        tr_help(&o, NULL, &b, 80);
        HOLDS(b.s, "--lr X                    rate; also --learning-rate [0]\n");
        HOLDS(b.s, "  -m, -o, --checkpoint TEXT file; also --model, --resume\n");
        HOLDS(b.s, "  --out TEXT                directory; also --out-dir\n");
        tr_buf_free(&b);
    }
}

/* No name of the table is in two rows that the same program can have: the rows of an
   option are one, and a name of two options is either of a letter or in `like`. */
static void test_name_table(void) {
    size_t i, k, n;
    int j;
    for (i = 0; i < TR_NAMES; i++) {
        const char *name;
        EXPECT(i == 0 || strcmp(tr_names[i].ours, tr_names[i - 1].ours) > 0);
        for (j = 0; (name = tr_choice(tr_names[i].also, j, &n)) != NULL; j++)
            for (k = 0; k < TR_NAMES; k++) {
                EXPECT(k == i || n == 1 || tr_choice_index(tr_names[k].also, name, n) < 0);
                EXPECT(tr_choice_index(tr_names[k].like, name, n) < 0);
            }
    }
}

/* Command lines that must be refused, and a part of each error. */
static const char *const bad_options[][2] = {
    {"--nlayers=0", "--nlayers: expected a whole number from 1 to 100, got '0'"},
    {"--nlayers|101", "from 1 to 100"},
    {"--nlayers|-1", "got '-1'"},
    {"--nlayers|8x", "got '8x'"},
    {"--nlayers| 8", "got ' 8'"},
    {"--nlayers=", "got ''"},
    {"--nlayers=+8", "got '+8'"},
    {"--nlayers=0x8", "got '0x8'"},
    {"--nlayers=8.0", "got '8.0'"},
    {"--nlayers=-", "got '-'"},
    {"--nheads=2147483648", "from -2147483648 to 2147483647"},
    {"--nheads=99999999999999999999999", "expected a whole number"},
    {"--steps=18446744073709551616", "from 1 to 18446744073709551615"},
    {"--steps=-1", "--steps: expected a whole number from 1 to 18446744073709551615, got '-1'"},
    {"--steps=0", "--steps: expected a whole number from 1 to 18446744073709551615, got '0'"},
    {"--steps=1e3", "--steps: expected a whole number from 1 to 18446744073709551615, got '1e3'"},
    {"--lr=0", "--lr: expected a number above 0, got '0'"},
    {"--lr=nan", "got 'nan'"},
    {"--lr=inf", "got 'inf'"},
    {"--lr=1e999", "got '1e999'"},
    {"--lr=1e-999", "got '1e-999'"},
    {"--lr=0x1p3", "got '0x1p3'"},
    {"--lr=1.5f", "got '1.5f'"},
    {"--lr=e", "got 'e'"},
    {"--lr=1-2", "got '1-2'"},
    {"--bias=-inf", "--bias: expected a number, got '-inf'"},
    {"--dropout=1", "expected a number of at least 0 and below 1"},
    {"--dropout=-0.1", "expected a number of at least 0 and below 1"},
    {"--optim=adan",
     "expected one of adagrad, sgd, adam, inv_sqrt, got 'adan' (did you mean adam?)"},
    {"--optim=", "expected one of"},
    {"--optim=adagrad|sgd", "expected an option, got 'sgd'"},
    {"--optim=ada", "expected one of"},
    {"--fast=2", "--fast: expected on or off (also 1, 0, true, false, yes, no), got '2'"},
    {"--fast|1", "--fast: expected no value after a flag, got '1'"},
    {"--no-fast=1", "--no-fast: expected no value, got '1'"},
    {"--no-lr", "--lr is not a flag"},
    {"--nhead|8", "--nhead: unknown option (did you mean --nheads?)"},
    {"--adaptspan", "did you mean --adapt-span?"},
    {"--n-layers=3", "did you mean --nlayers?"},
    {"--no-fats", "did you mean --no-fast?"},
    {"--hlep", "did you mean --help?"},
    /* prefixes of an option */
    {"--drop|0.1", "did you mean --dropout?"},
    {"--pro|x", "did you mean --prompt?"},
    /* names that other programs use */
    {"--learning_rat|1", "--learning_rat: unknown option (did you mean --lr?)"},
    {"--max_itres=5", "did you mean --steps?"},
    {"--num_steps|3", "did you mean --steps?"},
    {"--n_layr|3", "did you mean --nlayers?"},
    {"-f|x", "-f: unknown option (did you mean --data?); --help all lists all options"},
    {"-lr|1", "-lr: unknown option (did you mean --lr?)"},
    {"--prompt_file|x", "--prompt_file: unknown option (did you mean --prompt?)"},
    {"--lr_x=1", "--lr_x: unknown option (did you mean --lr?)"},
    {"--no-adapt-spam", "(did you mean --no-adapt-span?)"},
    {"--no-literl", "(did you mean --no-literal?)"},
    {"-z", "expected an option, got '-z'"},
    {"--Nlayers=3", "did you mean --nlayers?"},
    {"--=3", "unknown option"},
    {"--aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
     "unknown"},
    /* all at once, and names without an equivalent */
    {"--n_layr|3|--fast|--compile|--xyzzy=1",
     "unknown options: --n_layr (did you mean --nlayers?), --compile (not necessary), --xyzzy; "
     "--help all lists all options"},
    {"--num_samples=3", "--num_samples: unknown option (each --generate writes one text); --help"},
    {"--xyzzy|-x|--beta2", "unknown option"},
    {"--lr", "--lr: expected a number above 0, got nothing"},
    {"--lr|--steps|3", "--lr: expected a number above 0, got the option '--steps'"},
    {"file.txt", "expected an option, got 'file.txt'"},
    {"--", "expected an option, got '--'"},
    {"-n|3", "expected an option, got '-n'"}};

static void test_bad_options(void) {
    size_t i;
    for (i = 0; i < sizeof bad_options / sizeof *bad_options; i++)
        EXPECT(fails_with(bad_options[i][0], bad_options[i][1]));
    EXPECT(fails_with("--xyzzy", "--xyzzy: unknown option; --help all lists all options"));
    EXPECT(strstr(err, "did you mean") == NULL);
    EXPECT(tr_is_opposite("do-train", 8, "no-train") && !tr_is_opposite("notrain", 7, "no-train"));
    EXPECT(tr_is_opposite("no-fats", 7, "fast") && !tr_is_opposite("no-fats", 7, "no-fast"));
    EXPECT(!tr_is_opposite("nheads", 6, "nheads") && !tr_is_opposite("norm", 4, "normal"));
    EXPECT(tr_fail(NULL, 0, "nothing %d", 1) == 0);
    EXPECT(tr_distance("kitten", 6, "sitting", 7) == 3 && tr_distance("", 0, "abc", 3) == 3);
    EXPECT(tr_distance("a_b", 3, "a-b", 3) == 0);
}

/* Tests a flag that accepts a count. Each row has the arguments, the value, and its
   form in a checkpoint. */
static void test_some(void) {
    static const struct {
        const char *arg[2];
        int value;
        const char *json;
    } good[] = {{{NULL, NULL}, 0, "false"},
                {{"--again", NULL}, TR_ALL, "true"},
                {{"--no-again", NULL}, 0, "false"},
                {{"--again=on", NULL}, TR_ALL, "true"},
                {{"--again", "auto"}, TR_AS_FITS, "\"auto\""},
                {{"--again=auto", NULL}, TR_AS_FITS, "\"auto\""},
                {{"--again", "7"}, 7, "7"},
                {{"--again", "1"}, 1, "1"},
                {{"--again=0", NULL}, 0, "false"},
                {{"--again=40", NULL}, 40, "40"},
                {{"--again", "--quick"}, TR_ALL, "true"}};
    static const char *const bad[] = {"--again=41", "--again=-1",    "--again=7x",
                                      "--again=",   "--again=maybe", "--no-again=3"};
    static int again, quick;
    tr_opt one[] = {TR_SOME("again", TR_FREE, &again, 40, "again"),
                    TR_FLAG("quick", TR_LOCAL, &quick, "be quick"), TR_END};
    tr_options o = {"prog", "", one, NULL, NULL, NULL, "", NULL, NULL};
    char *argv[4] = {(char *)(uintptr_t) "prog", NULL, NULL, NULL}, expected[64];
    size_t i;
    int k;
    for (i = 0; i < sizeof good / sizeof *good; i++) {
        tr_adopted a;
        char *json;
        for (k = 0; k < 2; k++) argv[1 + k] = (char *)(uintptr_t)good[i].arg[k];
        EXPECT(tr_parse(&o, 1 + (argv[1] != NULL) + (argv[2] != NULL), argv, err, sizeof err) == 1
               && again == good[i].value);
        json = tr_options_json(&o, 1);
        snprintf(expected, sizeof expected, "{\"preset\":null,\"again\":%s}", good[i].json);
        SAME(json, expected);
        /* Without the option, the checkpoint's value is adopted. A different value is
           reported. */
        EXPECT(tr_parse(&o, 1, argv, err, sizeof err) == 1 && again == 0);
        EXPECT(tr_options_adopt(&o, json, TR_RESUME, &a, err, sizeof err) == 1
               && again == good[i].value && !a.changed.n);
        tr_adopted_free(&a);
        argv[1] = (char *)(uintptr_t) "--again=3";
        EXPECT(tr_parse(&o, 2, argv, err, sizeof err) == 1);
        EXPECT(tr_options_adopt(&o, json, TR_RESUME, &a, err, sizeof err) == 1 && again == 3
               && a.changed.n);
        snprintf(expected, sizeof expected, "{\"again\":[%s,3]}", good[i].json);
        SAME(a.json.s, expected);
        tr_adopted_free(&a);
        free(json);
    }
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        argv[1] = (char *)(uintptr_t)bad[i];
        EXPECT(tr_parse(&o, 2, argv, err, sizeof err) == 0);
        HOLDS(err, "--");
    }
    argv[1] = (char *)(uintptr_t) "--again=41";
    EXPECT(tr_parse(&o, 2, argv, err, sizeof err) == 0);
    SAME(err, "--again: expected on, off, auto or a whole number up to 40, got '41'");
}

static void test_presets(void) {
    EXPECT(parse("--preset|enwik8_small") == 1 && nlayers == 4 && lr == 0.5 && adapt_span == 1
           && optim == 1 && fast == 0);
    SAME(options.preset_used, "enwik8_small");
    EXPECT(!tr_given(&options, "nlayers"));
    EXPECT(parse("--nlayers|6|--preset=enwik8-small|--fast") == 1 && nlayers == 6 && lr == 0.5
           && fast == 1);
    EXPECT(tr_given(&options, "nlayers") && !tr_given(&options, "lr"));
    EXPECT(parse("--preset|enwik8_small|--preset|enwik8_large") == 1 && nlayers == 24
           && lr == 0.07);
    EXPECT(parse("--prompt|preset|--data|x") == 1 && !options.preset_used[0]);
    EXPECT(fails_with(
         "--preset|enwik8_smal",
         "expected one of enwik8_small, enwik8_large, got 'enwik8_smal' (did you mean "
         "enwik8_small?)"));
    EXPECT(fails_with("--preset|zzz",
                      "--preset: expected one of enwik8_small, enwik8_large, got 'zzz'"));
    EXPECT(fails_with("--preset", "--preset: expected the name of a preset, got nothing"));
    EXPECT(fails_with("--preset|--lr=1", "--preset: expected the name of a preset, got nothing"));
    EXPECT(fails_with("--presets|a", "did you mean --preset?"));
}

/* Errors in a program's option tables must be detected. */
static void test_tables(void) {
    {
        tr_preset one[2] = {{"broken", "b", "lr=1 nlayer=4"}, TR_PRESET_END};
        tr_options o = options;
        o.preset = one;
        nlayers = 8;
        EXPECT(tr_check_table(&options, err, sizeof err) == 1);
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        SAME(err,
             "preset broken: --nlayer: unknown option (did you mean --nlayers?); --help all lists "
             "all options");
        one[0].set = "nlayers=0";
        EXPECT(tr_check_table(&o, err, sizeof err) == 0 && nlayers == 8);
        HOLDS(err, "preset broken: --nlayers: expected a whole number from 1 to 100, got '0'");
        one[0].set = "nlayers";
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        HOLDS(err, "preset broken: --nlayers: expected a whole number from 1 to 100, got nothing");
        /* values are validated but not set */
        one[0].set = "data=text no-fast";
        EXPECT(tr_check_table(&o, err, sizeof err) == 1 && data == NULL && fast == 1);
        one[0].name = "a-name-that-is-longer-than-the-space-that-is-reserved-for-names-of-presets";
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        HOLDS(err, "the name is too long");
        o.preset = NULL;
        o.defaults = "nlayers=8 nhead=2";
        EXPECT(tr_reset(&o, err, sizeof err) == 0);
        HOLDS(err, "option table: invalid default: --nhead: unknown option "
                   "(did you mean --nheads?)");
        EXPECT(parse("") == 1);
        EXPECT(tr_select_preset(&o, "x", err, sizeof err) == 0);
        HOLDS(err, "has no presets");
    }
    {
        tr_opt twice[] = {TR_INT("a-b", TR_LOCAL, &nlayers, 0, 0, ""),
                          TR_INT("a_b", TR_LOCAL, &nheads, 0, 0, ""), TR_END};
        tr_opt reserved[] = {TR_INT("help", TR_LOCAL, &nlayers, 0, 0, ""), TR_END};
        tr_opt range[] = {TR_INT("a", TR_LOCAL, &nlayers, 50, 60, ""), TR_END};
        tr_options o = {"p", "", twice, NULL, NULL, NULL, "", NULL, NULL};
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        HOLDS(err, "declared twice");
        {
            static const tr_basic basic[] = {{"preset", "", ""}, {"a_b", "", ""}, {"c", "", ""},
                                             {NULL, NULL, NULL}};
            static const tr_brief brief = {basic, ""};
            tr_options p = o;
            p.opt = twice + 1;
            EXPECT(tr_check_table(&p, err, sizeof err) == 1);
            p.brief = &brief;
            EXPECT(tr_check_table(&p, err, sizeof err) == 0);
            SAME(err, "short help: there is no option --c");
        }
        o.opt = reserved;
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        HOLDS(err, "reserved");
        o.opt = range;
        EXPECT(tr_check_table(&o, err, sizeof err) == 0);
        HOLDS(err, "default of --a");
    }
}

/* Returns the length of the longest line. */
static size_t longest_line(const char *text) {
    size_t longest = 0, n;
    for (; *text != 0; text += n + (text[n] != 0)) {
        n = strcspn(text, "\n");
        if (n > longest) longest = n;
    }
    return longest;
}

/* The text of --help, which tr_parse prints to standard output, or NULL. */
static const char *printed_help(const char *line) {
    int keep = dup(1), file = open(in_dir("help"), O_WRONLY | O_CREAT | O_TRUNC, 0600), r;
    fflush(stdout);
    dup2(file, 1);
    r = parse(line);
    fflush(stdout);
    dup2(keep, 1);
    close(keep);
    close(file);
    return r == 2 ? get_file(in_dir("help"), NULL) : NULL;
}

static void test_help(void) {
    static const tr_basic basic[] = {{"data", "FILE", "the text"},
                                     {"preset", "NAME", "settings"},
                                     {NULL, NULL, NULL}};
    static const tr_brief brief = {basic, "--data a.txt\n-p b\n"};
    static const size_t width[] = {80, 100, 40};
    const char *text;
    size_t i;
    tr_buf b;
    memset(&b, 0, sizeof b);
    EXPECT(parse("--preset|enwik8_small") == 1);
    for (i = 0; i < 3; i++) {
        b.n = 0;
        tr_help(&options, NULL, &b, width[i]);
        EXPECT(longest_line(b.s) > width[i] - 10 && longest_line(b.s) <= width[i]);
    }
    b.n = 0;
    tr_help(&options, NULL, &b, 80);
    HOLDS(b.s, "usage: prog [--preset NAME]");
    HOLDS(b.s, "\nModel\n");
    HOLDS(b.s, "--nlayers N               number of layers; also --n-layer, --num-layers [4]\n");
    HOLDS(b.s, "optimiser (adagrad, sgd, adam, inv_sqrt) [sgd]");
    HOLDS(b.s, "Values in brackets are those of --preset enwik8_small");
    HOLDS(b.s, "--no-adapt-span");
    HOLDS(b.s, "  -p, --prompt TEXT         what to begin with");
    HOLDS(b.s, "\nPresets\n  enwik8_small              a small one\n");
    HOLDS(b.s, "\nThe end.\n");
    tr_buf_free(&b);
    text = printed_help("--help");
    HOLDS(text, "optimiser steps");
    EXPECT(longest_line(text) <= 80);

    /* the short help, and the parts of the long one */
    options.brief = &brief;
    text = printed_help("--help");
    HOLDS(text,
          "Tests options.\n\n  --data FILE               the text\n"
          "  --preset NAME             settings\n\n  prog --data a.txt\n  prog -p b\n\n");
    HOLDS(printed_help("-h"), "--data a.txt");
    HOLDS(printed_help("--help|all"), "optimiser steps");
    HOLDS(printed_help("--help=all"), "optimiser steps");
    HOLDS(printed_help("--lr|0.5|--help"), "  prog --data a.txt");
    HOLDS(printed_help("--help|--preset|enwik8_small"), "optimiser (adagrad, sgd, adam, inv_sqrt)");
    SAME(printed_help("--help|max_iters"),
         "  --steps N                 optimiser steps; also --max-iters, --max-step,\n"
         "                            --max-steps [1000]\n");
    SAME(printed_help("--help=--lr"),
         "  --lr X                    learning rate; also --learning-rate, --max-lr [0.07]\n");
    text = printed_help("--help|trai");
    EXPECT(text != NULL && strncmp(text, "Training\n  --steps N ", 21) == 0);
    HOLDS(text, "  --nothing ");
    HOLDS(printed_help("--help|presets"), "\nPresets\n  enwik8_small ");
    EXPECT(printed_help("--help|nlayer") == NULL);
    SAME(err, "--help: expected all, or the name of an option or group, got 'nlayer' (did you mean "
              "nlayers?); --help all lists them");
    options.brief = NULL;
}

/* Returns the result of tr_options_adopt for a command line and the checkpoint `json`:
   "CHANGED|JSON|GIVEN|MISSING", or "refused". */
static const char *adopted(const char *line, const char *json, int why_opened) {
    static char out[1024];
    tr_adopted a;
    if (parse(line) != 1) return "not parsed";
    if (tr_options_adopt(&options, json, why_opened, &a, err, sizeof err) != 1) return "refused";
    snprintf(out, sizeof out, "%s|%s|%s|%s", a.changed.n ? a.changed.s : "",
             a.json.n ? a.json.s : "", a.given.n ? a.given.s : "", a.missing.n ? a.missing.s : "");
    tr_adopted_free(&a);
    return out;
}

/* Options that are written to a checkpoint must be read back unchanged. */
static void test_configuration(void) {
    static const char sent[] = "--preset|enwik8_small|--data|a\"\\\n\xff\xc3\xa9|"
                               "--steps|18446744073709551615|--nheads=16";
    char *json, *again, value[64];
    EXPECT(parse(sent) == 1);
    json = tr_options_json(&options, 0);
    SAME(json,
         "{\"preset\":\"enwik8_small\",\"nlayers\":4,\"nheads\":16,\"adapt-span\":true,"
         "\"fast\":false,\"dropout\":0.1,\"steps\":18446744073709551615,\"lr\":0.5,\"bias\":0,"
         "\"optim\":\"sgd\",\"data\":\"a\\\"\\\\\\n\\ufffd\xc3\xa9\",\"prompt\":\"\","
         "\"literal\":false,\"nothing\":false,\"later\":0}");
    EXPECT(tr_json_find(json, "optim", value, sizeof value) == 1);
    SAME(value, "sgd");
    EXPECT(tr_json_find(json, "data", value, sizeof value) == 1);
    SAME(value, "a\"\\\n\xef\xbf\xbd\xc3\xa9");
    free(json);
    /* A checkpoint must not contain local options. */
    json = tr_options_json(&options, 1);
    EXPECT(json != NULL && strstr(json, "\"fast\"") == NULL && strstr(json, "\"lr\":0.5,") != NULL);

    /* All values and the name of the preset come from the checkpoint. */
    SAME(adopted("", json, 1), "|||");
    EXPECT(nlayers == 4 && nheads == 16 && adapt_span == 1 && optim == 1 && lr == 0.5
           && steps == UINT64_MAX && fast == 1);
    SAME(data, "a\"\\\n\xef\xbf\xbd\xc3\xa9");
    SAME(options.preset_used, "enwik8_small");
    EXPECT(tr_find_option(&options, "lr", 2)->from == TR_FROM_CHECKPOINT);
    /* All text in the checkpoint is now UTF-8, so the next checkpoint must be the
       same. */
    again = tr_options_json(&options, 1);
    SAME(adopted("", again, 1), "|||");
    free(json);
    json = tr_options_json(&options, 1);
    SAME(json, again);
    free(again);
    /* Repeating the command, or a part of it, must change nothing. */
    SAME(adopted("--preset|enwik8_small|--nheads=16", json, 1), "|||");
    SAME(adopted("--nlayers=4|--lr=0.50", json, 1), "|||");
    EXPECT(tr_find_option(&options, "lr", 2)->from == TR_FROM_ARGS);
    /* The data path is only a hint: a different value does not count as a change. */
    SAME(adopted("--data|elsewhere", json, 1), "|||");
    SAME(data, "elsewhere");
    free(json);
}

/* Options that differ from the checkpoint must be reported or refused. */
static void test_changes(void) {
    char *json;
    parse("--preset|enwik8_small|--steps|18446744073709551615|--nheads=16");
    json = tr_options_json(&options, 1);
    SAME(adopted("--lr=0.25|--prompt=x\"|--dropout|0.1", json, 1),
         "--lr 0.25 (0.5), --prompt x\" ()"
         "|{\"lr\":[0.5,0.25],\"prompt\":[\"\",\"x\\\"\"]}||");
    EXPECT(lr == 0.25 && steps == UINT64_MAX);
    /* Without training, the difference does not matter. */
    SAME(adopted("--lr=0.25", json, 0), "|||");
    SAME(adopted("--nlayers=5", json, 1), "refused");
    HOLDS(err, "--nlayers is 5 here (from the command line) but 4 in the checkpoint: leave it out");
    /* The model's shape must always match the checkpoint. */
    SAME(adopted("--nlayers=5", json, 0), "refused");
    SAME(adopted("--optim=adam", json, 1), "refused");
    HOLDS(err, "--optim is adam here (from the command line) but sgd in the checkpoint");
    SAME(adopted("--optim=adam", json, 0), "|||");
    SAME(adopted("--preset=enwik8_large", json, 1), "refused");
    HOLDS(err, "--nlayers is 24 here (from --preset enwik8_large) but 4 in the checkpoint: "
               "leave --preset out");
    free(json);
    SAME(adopted("", "{\"nlayers\":0}", 1), "refused");
    HOLDS(err, "the checkpoint's configuration is invalid: --nlayers: "
               "expected a whole number from 1 to 100, got '0'");
    SAME(adopted("", "{\"nlayers\":", 1), "refused");
    HOLDS(err, "malformed");
    /* If an old checkpoint lacks options, each of them must be reported, whether or not
       the command line sets it. An option marked TR_LATER must not be reported and must
       keep its default. */
    SAME(adopted("",
                 "{\"nlayers\":4,\"nheads\":2,\"adapt-span\":false,\"bias\":0,\"optim\":\"sgd\","
                 "\"prompt\":null}",
                 1),
         "|||--dropout, --steps, --lr");
    EXPECT(prompt == NULL);
    SAME(adopted("--preset|enwik8_small|--dropout=0|--nlayers=4",
                 "{\"nlayers\":4,\"nheads\":2,\"bias\":0,\"prompt\":\"\"}", 1),
         "||--adapt-span, --dropout, --lr, --optim|--steps");
}

/* A run that starts from the weights of another run must adopt only the options of
   class TR_MODEL and the options marked TR_KEPT. No difference may be reported. */
static void test_initial_weights(void) {
    static const char json[] = "{\"preset\":\"enwik8_small\",\"nlayers\":4,\"dropout\":0.25,"
                               "\"steps\":7,\"lr\":0.5,\"optim\":\"sgd\",\"data\":\"there\"}";
    SAME(adopted("", json, TR_INIT), "|||");
    EXPECT(nlayers == 4 && nheads == 2 && dropout == 0.25 && steps == 1000 && lr == 0.07
           && optim == 0 && data == NULL);
    EXPECT(!options.preset_used[0]);
    SAME(adopted("--dropout=0.5|--nlayers=4|--lr=1|--nheads=3", json, TR_INIT), "|||");
    EXPECT(nlayers == 4 && dropout == 0.5 && lr == 1 && nheads == 3);
    SAME(adopted("--nlayers=5", json, TR_INIT), "refused");
    HOLDS(err, "--nlayers is 5 here (from the command line) but 4 in the checkpoint: "
               "leave it out to start from its weights");
    SAME(adopted("--preset=enwik8_large", json, TR_INIT), "refused");
    HOLDS(err, "(from --preset enwik8_large) but 4 in the checkpoint: "
               "leave --preset out to start from its weights");
    EXPECT(parse("--prompt=x") == 1);
    tr_options_free(&options);
    EXPECT(prompt == NULL);
}

/* The names of a set must be accepted in one list or one by one. It must also be
   possible to select all names, or none, at once. */
static void test_set(void) {
    EXPECT(parse("") == 1 && literal == 0);
    EXPECT(parse("--literal") == 1 && literal == TR_EVERY);
    EXPECT(parse("--literal|--nlayers=4") == 1 && literal == TR_EVERY && nlayers == 4);
    EXPECT(parse("--literal|pad|--nlayers=4") == 1 && literal == 2 && nlayers == 4);
    EXPECT(parse("--literal=free-ze,rows") == 1 && literal == 5);
    EXPECT(parse("--literal|pad|--literal|rows") == 1 && literal == 1);
    EXPECT(parse("--literal-rows|--literal_free_ze|--nlayers=4") == 1 && literal == 5);
    EXPECT(nlayers == 4);
    EXPECT(parse("--literal-rows=on|--literal-pad=off") == 1 && literal == 1);
    EXPECT(parse("--literal|rows,pad|--no-literal-pad") == 1 && literal == 1);
    EXPECT(parse("--literal|--no-literal-pad") == 1 && literal == (TR_EVERY | 2 << TR_REMOVED));
    EXPECT(tr_set_removed(literal) == 2 && tr_set_given(literal) == TR_EVERY);
    EXPECT(parse("--literal=all,no-pad") == 1 && literal == (TR_EVERY | 2 << TR_REMOVED));
    EXPECT(parse("--literal|--no-literal-pad|--literal-pad") == 1 && literal == (TR_EVERY | 2));
    EXPECT(tr_set_removed(literal) == 0);
    EXPECT(parse("--literal|--no-literal-pad|--literal") == 1 && literal == TR_EVERY);
    EXPECT(parse("--literal=all") == 1 && literal == TR_EVERY);
    EXPECT(tr_set_removed(7) == 0);
    EXPECT(parse("--literal=rows,no-pad") == 0 && parse("--nothing=all") == 0);
    EXPECT(parse("--literal|--no-literal") == 1 && literal == 0);
    EXPECT(parse("--literal=off") == 1 && literal == 0);
    EXPECT(parse("--nothing=off|--no-nothing") == 1 && nothing == 0);

    EXPECT(parse("--literal|rows,pat") == 0);
    SAME(err, "--literal: expected on, off, or any of rows, pad, free_ze, got 'rows,pat' "
              "(did you mean pad?)");
    EXPECT(parse("--literal=") == 0);
    HOLDS(err, "any of rows, pad, free_ze");
    EXPECT(parse("--literal=rows,") == 0);
    EXPECT(parse("--literal-pad|rows") == 0);
    HOLDS(err, "expected an option, got 'rows'");
    EXPECT(parse("--literal-pad=rows") == 0);
    HOLDS(err, "--literal-pad: expected on or off, got 'rows'");
    EXPECT(parse("--literal-other") == 0);
    HOLDS(err, "--literal-other: unknown option");
    EXPECT(parse("--nothing") == 0);
    SAME(err, "--nothing: this model has none");
    EXPECT(parse("--nothing|rows") == 0);
    SAME(err, "--nothing: this model has none");
}

/* A set must be readable from a checkpoint, even from one with a flag per name. */
static void test_set_adopted(void) {
    const char *flags = "{\"literal-rows\":true,\"literal-pad\":false,\"literal-free_ze\":true}";
    char *json;
    EXPECT(parse("--literal=rows,free_ze") == 1);
    json = tr_options_json(&options, 1);
    HOLDS(json, "\"literal\":\"rows,free_ze\"");
    EXPECT(strstr(json, "nothing") == NULL);
    SAME(adopted("", json, TR_RESUME), "|||");
    EXPECT(literal == 5);
    SAME(adopted("--literal=free_ze,rows", json, TR_RESUME), "|||");
    SAME(adopted("--literal", json, TR_RESUME), "refused");
    HOLDS(err, "--literal is true here (from the command line) but rows,free_ze in the checkpoint");
    SAME(adopted("--literal-rows", json, TR_RESUME), "refused");
    SAME(adopted("--literal-rows", json, TR_INIT), "|||"); /* free_ze affects only training */
    EXPECT(literal == 1);
    SAME(adopted("--literal=free_ze", json, TR_INIT), "refused");
    SAME(adopted("", json, TR_INIT), "|||");
    EXPECT(literal == 5);
    free(json);
    SAME(adopted("", "{\"literal\":true}", TR_INIT), "|||");
    EXPECT(literal == TR_EVERY);
    SAME(adopted("--literal=rows,pad,free_ze", "{\"literal\":true}", TR_INIT), "|||");
    EXPECT(literal == 7);
    SAME(adopted("--literal", "{\"literal\":false}", TR_INIT), "refused");

    EXPECT(parse("--literal|--no-literal-rows|--no-literal-free_ze") == 1);
    json = tr_options_json(&options, 1);
    HOLDS(json, "\"literal\":\"all,no-rows,no-free_ze\"");
    SAME(adopted("", json, TR_INIT), "|||");
    EXPECT(tr_set_removed(literal) == 5);
    SAME(adopted("--literal|--no-literal-free_ze|--no-literal-rows", json, TR_RESUME), "|||");
    SAME(adopted("--literal|--no-literal-rows", json, TR_INIT), "|||");
    SAME(adopted("--literal|--no-literal-rows", json, TR_RESUME), "refused");
    SAME(adopted("--literal", json, TR_INIT), "refused");
    free(json);
    SAME(adopted("", "{\"literal\":\"pat\"}", TR_INIT), "refused");
    HOLDS(err, "the checkpoint's configuration is invalid: --literal: "
               "expected on, off, or any of rows, pad, free_ze, got 'pat'");

    SAME(adopted("", flags, TR_INIT), "|||");
    EXPECT(literal == 5);
    SAME(adopted("--literal-rows|--literal-free_ze", flags, TR_LOOK),
         "|||--nlayers, --nheads, --adapt-span, --dropout, --steps, --lr, --bias, --optim, "
         "--prompt");
    SAME(adopted("--literal-pad", flags, TR_INIT), "refused");
    HOLDS(err, "--literal is pad here (from the command line) but rows,free_ze in the checkpoint");
    SAME(adopted("", "{\"literal-rows\":false}", TR_INIT), "|||");
    EXPECT(literal == 0);
    SAME(adopted("--literal", "{\"literal-rows\":false}", TR_INIT), "refused");
    HOLDS(err, "but false in the checkpoint");
    SAME(adopted("", "{\"literal-rows\":7}", TR_INIT), "refused");
    HOLDS(err, "malformed");
}

static void test_set_help(void) {
    tr_buf b;
    memset(&b, 0, sizeof b);
    EXPECT(parse("--literal=pad") == 1);
    tr_help(&options, NULL, &b, 200);
    HOLDS(b.s, "--literal [NAMES]         literal forms of the original (rows, pad, free_ze; "
               "separated by commas; without names, all that apply) (switch off: --no-literal) "
               "[pad]\n");
    HOLDS(b.s, "--nothing                 this model has none [off]\n");
    tr_buf_free(&b);
}


// >>json

static void test_json_write(void) {
    static const double xs[] = {0, -0.0, 1, -1.5, 0.1, 1e-310, 5e-324, 1.7976931348623157e308,
                                3.141592653589793, 1e21, 123456789, 0.07, 1.0 / 3.0};
    char out[64];
    tr_buf b;
    size_t i;
    for (i = 0; i < sizeof xs / sizeof *xs; i++) {
        tr_number(out, xs[i]);
        EXPECT(strtod(out, NULL) == xs[i] && strlen(out) < 32);
    }
    tr_number(out, 0.07);
    SAME(out, "0.07");
    tr_number(out, 1e-5);
    SAME(out, "1e-05");
    tr_number(out, NAN);
    SAME(out, "null");
    tr_number(out, -HUGE_VAL);
    SAME(out, "null");

    memset(&b, 0, sizeof b);
    tr_json_string(&b, "q\" b\\ n\n t\t r\r \x01\x1f\x7f \xe2\x82\xac \xf0\x9f\x98\x80");
    SAME(b.s, "\"q\\\" b\\\\ n\\n t\\t r\\r \\u0001\\u001f\x7f \xe2\x82\xac \xf0\x9f\x98\x80\"");
    b.n = 0;
    /* bytes that are not UTF-8 */
    tr_json_string(&b, "\xc0\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xe2\x82|\x80|\xf0\x9f\x98");
    SAME(b.s, "\"\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd\\ufffd|"
              "\\ufffd\\ufffd|\\ufffd|\\ufffd\\ufffd\\ufffd\"");
    b.n = 0;
    tr_json_string(&b, NULL);
    SAME(b.s, "null");
    tr_buf_free(&b);
}

static void test_utf8(void) {
    static const char *const good[] = {"\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80",
                                       "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
                                       "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"};
    static const unsigned long point[] = {0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000,
                                          0x10FFFF};
    static const char *const bad[] = {"\x80", "\xC1\xBF", "\xC2", "\xE0\x9F\xBF", "\xE1\x80",
                                      "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                                      "\xF5\x80\x80\x80", "\xF1\x80\x80"};
    char out[5];
    size_t i;
    for (i = 0; i < sizeof good / sizeof *good; i++) {
        EXPECT(tr_utf8((const unsigned char *)good[i]) == strlen(good[i]));
        out[tr_utf8_encode(point[i], out)] = 0;
        SAME(out, good[i]);
    }
    for (i = 0; i < sizeof bad / sizeof *bad; i++)
        EXPECT(tr_utf8((const unsigned char *)bad[i]) == 0);
}

static void test_json_read(void) {
    static const char *const broken[] = {
        "", "x", "{", "{\"a\"", "{\"a\":", "{\"a\":}", "{\"a\" 1}", "{\"a\":1", "{\"a\":1}x",
        "{\"a\":\"", "{\"a\":\"\\", "{\"a\":[1,{]", "{a:1}", "{\"b\":1 \"a\":2}", "[1]",
        "{\"b\":1,}", "{\"b\":\"\\\"}", "{\"a\":\"\\u12\"}", "{\"a\":\"\\ud800\"}",
        "{\"a\":\"\\u0000\"}", "{\"a\":\"\\x\"}", "{\"a\":\"\\udc00\"}",
        "{\"a\":\"\\ud800\\u0041\"}"};
    char out[64], tiny[4];
    size_t i;
    EXPECT(tr_json_find(" { \"x\" : {\"a\":9,\"s\":\"}\"} , \"a\" : -1.5e3 }", "a", out, sizeof out)
           == 1);
    SAME(out, "-1.5e3");
    EXPECT(tr_json_find("{\"ab\":1,\"a\":2,\"a\":3}", "a", out, sizeof out) == 1);
    SAME(out, "2");
    EXPECT(tr_json_find("{\"ab\":1}", "a", out, sizeof out) == 0);
    EXPECT(tr_json_find("{\"a\":1}", "ab", out, sizeof out) == 0);
    EXPECT(tr_json_find("{\"l\":[1,{\"k\":\"]\"}],\"a\":true}", "l", out, sizeof out) == 1);
    SAME(out, "[1,{\"k\":\"]\"}]");
    EXPECT(tr_json_find("{\"a\":\"\\u20ac\\ud83d\\ude00\\/\\b\\u00e9\"}", "a", out, sizeof out)
           == 1);
    SAME(out, "\xe2\x82\xac\xf0\x9f\x98\x80/\b\xc3\xa9");
    EXPECT(tr_json_find("{}", "a", out, sizeof out) == 0
           && tr_json_find("{\"ab\":1}", "a", out, sizeof out) == 0);
    EXPECT(tr_json_find("{\"a\":12345}", "a", tiny, sizeof tiny) == -1);
    EXPECT(tr_json_find("{\"a\":\"12345\"}", "a", tiny, sizeof tiny) == -1);
    EXPECT(tr_json_find("{\"a\":123}", "a", tiny, sizeof tiny) == 1);
    for (i = 0; i < sizeof broken / sizeof *broken; i++) {
        int r = tr_json_find(broken[i], "a", out, sizeof out);
        if (r != -1) printf("  broken[%d]: expected -1, got %d\n", (int)i, r);
        EXPECT(r == -1);
    }
}


// >>log

static void test_log(void) {
    tr_log log;
    const char *path = in_dir("run.jsonl");
    /* Without a file, no call has an effect. */
    EXPECT(tr_log_open(&log, NULL, TR_KEEP_ALL, err, sizeof err) == 1);
    tr_log_begin(&log, "train");
    tr_log_num(&log, "loss", 1);
    tr_log_list(&log, "spans");
    tr_log_item(&log, "1");
    tr_log_list_end(&log);
    EXPECT(tr_log_end(&log) == 1 && tr_log_close(&log) == 1);

    EXPECT(tr_log_open(&log, path, TR_KEEP_ALL, err, sizeof err) == 1);
    tr_log_begin(&log, "config");
    tr_log_json(&log, "options", "{\"step\":999}");
    tr_log_list(&log, "spans");
    tr_log_item(&log, "2");
    tr_log_item(&log, "0.5");
    tr_log_list_end(&log);
    tr_log_list(&log, "none");
    tr_log_list_end(&log);
    EXPECT(tr_log_end(&log) == 1);
    tr_log_begin(&log, "train");
    tr_log_int(&log, "step", 18446744073709551615u);
    tr_log_num(&log, "loss", NAN);
    tr_log_num(&log, "lr", 0.07);
    tr_log_str(&log, "note", "a\nb");
    EXPECT(tr_log_end(&log) == 1);
    SAME(get_file(path, NULL),
         "{\"event\":\"config\",\"options\":{\"step\":999},\"spans\":[2,0.5],"
         "\"none\":[]}\n"
         "{\"event\":\"train\",\"step\":18446744073709551615,\"loss\":null,\"lr\":0.07,"
         "\"note\":\"a\\nb\"}\n");
    EXPECT(tr_log_close(&log) == 1);
    EXPECT(tr_log_end(&log) == 1); /* no effect after the close */
}

/* Resuming at step 20 must remove all later steps, wherever they are, and the
   incomplete last line. The other lines must stay unchanged. */
static void test_log_resumed(void) {
    tr_log log;
    const char *path = in_dir("run.jsonl"), *link = in_dir("link.jsonl");
    struct stat st;
    put_text(path, "{\"event\":\"config\",\"options\":{\"step\":999}}\n"
                   "{\"event\":\"train\",\"step\":10}\n"
                   "{\"event\":\"eval\",\"step\":20}\n"
                   "by hand\n"
                   "{\"event\":\"train\",\"step\":21}\n"
                   "{\"step\":\"x\"}\n"
                   "{\"event\":\"eval\",\"step\":30,\"s\":\"}\"}\n"
                   "{\"event\":\"train\",\"step\":15}\n"
                   "{\"event\":\"train\",\"st");
    EXPECT(chmod(path, 0640) == 0);
    EXPECT(symlink("run.jsonl", link) == 0);
    EXPECT(tr_log_open(&log, link, 20, err, sizeof err) == 1);
    tr_log_begin(&log, "train");
    tr_log_int(&log, "step", 21);
    EXPECT(tr_log_end(&log) == 1 && tr_log_close(&log) == 1);
    SAME(get_file(path, NULL), "{\"event\":\"config\",\"options\":{\"step\":999}}\n"
                               "{\"event\":\"train\",\"step\":10}\n"
                               "{\"event\":\"eval\",\"step\":20}\n"
                               "by hand\n"
                               "{\"step\":\"x\"}\n"
                               "{\"event\":\"train\",\"step\":15}\n"
                               "{\"event\":\"train\",\"step\":21}\n");
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 0777) == 0640);
    EXPECT(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    EXPECT(dir_entries(dir, ".tmp") == 0);
    EXPECT(tr_log_open(&log, path, 0, err, sizeof err) == 1 && tr_log_close(&log) == 1);
    SAME(get_file(path, NULL),
         "{\"event\":\"config\",\"options\":{\"step\":999}}\nby hand\n{\"step\":\"x\"}\n");
}

/* Runs in a child process. Writes five lines to a file whose size is limited to 50 bytes,
   and exits with the number of reported failures. */
static void write_limited_log(const char *path) {
    tr_log log;
    struct rlimit limit;
    int i, reported = 0;
    limit.rlim_cur = limit.rlim_max = 50;
    signal(SIGXFSZ, SIG_IGN);
    if (!tr_log_open(&log, path, TR_KEEP_ALL, err, sizeof err)
        || setrlimit(RLIMIT_FSIZE, &limit) != 0)
        _exit(9);
    for (i = 0; i < 5; i++) {
        tr_log_begin(&log, "train");
        tr_log_int(&log, "s", (uint64_t)i);
        reported += !tr_log_end(&log);
    }
    tr_log_close(&log);
    _exit(reported);
}

static void test_log_errors(void) {
    tr_log log;
    const char *full = in_dir("full.jsonl");
    int status = -1;
    pid_t child;
    EXPECT(tr_log_open(&log, in_dir("no/such/log"), TR_KEEP_ALL, err, sizeof err) == 0);
    HOLDS(err, "no/such/log: cannot open for writing: No such file or directory");
    EXPECT(tr_log_open(&log, dir, 5, err, sizeof err) == 0);
    HOLDS(err, "Is a directory");
    EXPECT(tr_log_end(&log) == 1 && tr_log_close(&log) == 1);
    /* Only the first failure may be reported. */
    if (access("/dev/full", W_OK) == 0) {
        EXPECT(tr_log_open(&log, "/dev/full", 5, err, sizeof err) == 1);
        tr_log_begin(&log, "train");
        EXPECT(tr_log_end(&log) == 0);
        HOLDS(log.err, "/dev/full: write failed");
        tr_log_begin(&log, "train");
        EXPECT(tr_log_end(&log) == 1 && tr_log_close(&log) == 1);
    }
    /* The third line does not fit, and its beginning must be removed. */
    fflush(stdout);
    child = fork();
    if (child == 0) write_limited_log(full);
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
           && WEXITSTATUS(status) == 1);
    SAME(get_file(full, NULL), "{\"event\":\"train\",\"s\":0}\n{\"event\":\"train\",\"s\":1}\n");
}


// >>files: replacing, claiming, standard streams, truncated maps

/* A file must be replaced as a whole, and its mode must be kept. */
static void test_replace(void) {
    const char *path = in_dir("whole.txt"), *victim = in_dir("victim");
    struct stat st;
    int files = flushed_files, dirs = flushed_dirs;
    EXPECT(tr_replace(path, "one", 3, err, sizeof err) == 1);
    SAME(get_file(path, NULL), "one");
    /* The rename must also be flushed to disk. */
    EXPECT(flushed_files == files + 1 && flushed_dirs == dirs + 1);
    EXPECT(chmod(path, 0640) == 0);

    /* A symbolic link with the name of the temporary file must not be followed, and
       foreign files must not be removed. */
    put_text(victim, "precious");
    EXPECT(symlink(victim, in_dir("whole.txt.0.tmp")) == 0
           && mkdir(in_dir("whole.txt.1.tmp"), 0700) == 0);
    EXPECT(tr_replace(path, "two", 3, err, sizeof err) == 1);
    SAME(get_file(path, NULL), "two");
    SAME(get_file(victim, NULL), "precious");
    EXPECT(lstat(path, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 07777) == 0640);
    EXPECT(dir_entries(dir, "whole.txt.") == 2);
    EXPECT(unlink(in_dir("whole.txt.0.tmp")) == 0 && rmdir(in_dir("whole.txt.1.tmp")) == 0);
}

/* Temporary files of killed processes must be removed; files of running processes must
   be kept. */
static void test_leftovers(void) {
    const char *path = in_dir("whole.txt");
    int out[2], go[2], status = -1;
    pid_t child;
    char c = 0;
    put_text(in_dir("whole.txt.0.tmp"), "half");
    EXPECT(tr_replace(path, "three", 5, err, sizeof err) == 1
           && dir_entries(dir, "whole.txt.") == 0);
    EXPECT(pipe(out) == 0 && pipe(go) == 0);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        int fd = tr_open_new(in_dir("whole.txt.0.tmp"), 0600);
        if (write(out[1], "x", 1) != 1 || read(go[0], &c, 1) < 0 || fd < 0) _exit(9);
        _exit(0);
    }
    EXPECT(read(out[0], &c, 1) == 1);
    EXPECT(tr_replace(path, "four", 4, err, sizeof err) == 1
           && dir_entries(dir, "whole.txt.") == 1);
    SAME(get_file(path, NULL), "four");
    EXPECT(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    EXPECT(tr_replace(path, "five", 4, err, sizeof err) == 1
           && dir_entries(dir, "whole.txt.") == 0);
    close(out[0]);
    close(out[1]);
    close(go[0]);
    close(go[1]);
}

/* Files with names of the maximum length, and links to files that do not exist, must be
   writable. Other targets must be refused with a reason. */
static void test_first_bytes(void) {
    const char *path = in_dir("bytes");
    char out[8];
    put_file(path, "abcd", 4);
    EXPECT(tr_first_bytes(path, out, 3) == 3 && memcmp(out, "abc", 3) == 0);
    EXPECT(tr_first_bytes(path, out, 8) == 4 && memcmp(out, "abcd", 4) == 0);
    EXPECT(tr_first_bytes(in_dir("nothing"), out, 8) == 0);
}

/* A chain of links, the last of which names a file that does not exist; then a circle. */
static void test_links(void) {
    char name[20], next[20], *end;
    int i;
    for (i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "link%d", i);
        snprintf(next, sizeof next, i < 4 ? "link%d" : "end", i + 1);
        EXPECT(symlink(next, in_dir(name)) == 0);
    }
    end = tr_resolve_links(in_dir("link0"));
    SAME(end, in_dir("end"));
    free(end);
    EXPECT(symlink("circle", in_dir("circle")) == 0);
    errno = 0;
    EXPECT(tr_resolve_links(in_dir("circle")) == NULL && errno == ELOOP);
}

static void test_targets(void) {
    char name[300];
    const char *path;
    struct stat st;
    memset(name, 'n', sizeof name);
    name[255] = 0;
    path = in_dir(name);
    EXPECT(tr_can_write("x", path, 0, err, sizeof err) == 1);
    EXPECT(tr_replace(path, "long", 4, err, sizeof err) == 1);
    SAME(get_file(path, NULL), "long");
    name[255] = 'n';
    name[256] = 0;
    EXPECT(tr_can_write("x", in_dir(name), 0, err, sizeof err) == 0);
    HOLDS(err, "File name too long");
    EXPECT(symlink("new.txt", in_dir("to-new")) == 0
           && tr_replace(in_dir("to-new"), "new", 3, err, sizeof err) == 1);
    SAME(get_file(in_dir("new.txt"), NULL), "new");
    EXPECT(lstat(in_dir("to-new"), &st) == 0 && S_ISLNK(st.st_mode));

    EXPECT(tr_replace(in_dir("no/such/file"), "x", 1, err, sizeof err) == 0);
    HOLDS(err, "no/such/file: cannot write: No such file or directory");
    EXPECT(tr_can_write("x", dir, 0, err, sizeof err) == 0);
    HOLDS(err, "expected a file, got a directory");
    EXPECT(tr_can_write("x", "/dev/null", 0, err, sizeof err) == 0
           && tr_can_write("x", "/dev/null", 1, err, sizeof err) == 1);
}

static void test_claims(void) {
    const char *path = in_dir("mine.st"), *link = in_dir("link.st"), *lock = in_dir("mine.st.lock");
    char name[256], owner[64];
    tr_claim a, b;
    int out[2], status = -1;
    pid_t child;
    char c = 0;
    put_text(path, "a checkpoint");
    EXPECT(symlink("mine.st", link) == 0 && pipe(out) == 0);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        if (!tr_claim_open(&a, "checkpoint", path, err, sizeof err) || write(out[1], "x", 1) != 1)
            _exit(9);
        for (;;) pause();
    }
    snprintf(owner, sizeof owner, "mine.st: another run (process %ld) is writing this file",
             (long)child);
    EXPECT(read(out[0], &c, 1) == 1);
    EXPECT(tr_unclaimed("checkpoint", path, err, sizeof err) == 0);
    HOLDS(err, owner);
    EXPECT(tr_claim_open(&b, "checkpoint", path, err, sizeof err) == 0);
    HOLDS(err, owner);
    /* the same file through a link */
    EXPECT(tr_claim_open(&b, "best", link, err, sizeof err) == 0);
    HOLDS(err, "--best");
    EXPECT(tr_claim_open(&b, "log", in_dir("other"), err, sizeof err) == 1); /* another file */
    tr_claim_close(&b);
    SAME(get_file(path, NULL), "a checkpoint");
    EXPECT(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    /* The lock file of a killed process remains and must have no effect. */
    EXPECT(access(lock, F_OK) == 0);
    EXPECT(tr_unclaimed("checkpoint", path, err, sizeof err) == 1);
    EXPECT(tr_claim_open(&b, "checkpoint", path, err, sizeof err) == 1);
    tr_claim_close(&b);
    tr_claim_close(&b);
    EXPECT(access(lock, F_OK) != 0 && dir_entries(dir, ".lock") == 0);
    EXPECT(tr_claim_open(&b, "log", NULL, err, sizeof err) == 1 && b.fd == -1);
    EXPECT(tr_claim_open(&b, "log", "/dev/null", err, sizeof err) == 1 && b.fd == -1);
    EXPECT(symlink("victim", lock) == 0
           && tr_claim_open(&b, "checkpoint", path, err, sizeof err) == 0);
    HOLDS(err, "cannot create the lock file");
    EXPECT(unlink(lock) == 0);
    /* Another file with the name of the lock must not be treated as a lock. */
    put_text(lock, "precious");
    EXPECT(tr_unclaimed("checkpoint", path, err, sizeof err) == 0);
    HOLDS(err, "mine.st.lock is not the lock file of a run: rename it");
    EXPECT(tr_claim_open(&b, "checkpoint", path, err, sizeof err) == 0 && b.fd == -1);
    HOLDS(err, "mine.st.lock is not the lock file of a run");
    tr_claim_close(&b);
    SAME(get_file(lock, NULL), "precious");
    EXPECT(unlink(lock) == 0 && mkfifo(lock, 0600) == 0);
    EXPECT(tr_claim_open(&b, "checkpoint", path, err, sizeof err) == 0);
    HOLDS(err, "is not the lock file of a run");
    EXPECT(unlink(lock) == 0);
    /* Two long names with the same beginning must have separate locks. */
    memset(name, 'n', sizeof name);
    name[255] = 0;
    EXPECT(tr_claim_open(&a, "checkpoint", in_dir(name), err, sizeof err) == 1);
    name[254] = 'm';
    EXPECT(tr_claim_open(&b, "checkpoint", in_dir(name), err, sizeof err) == 1);
    EXPECT(dir_entries(dir, ".lock") == 2);
    tr_claim_close(&a);
    tr_claim_close(&b);
    EXPECT(dir_entries(dir, ".lock") == 0);
    close(out[0]);
    close(out[1]);
}

static void test_streams(void) {
    int status = -1, fd;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        for (fd = 0; fd < 3; fd++) close(fd);
        tr_standard_streams();
        fd = open(in_dir("fourth"), O_WRONLY | O_CREAT, 0600);
        if (fd <= 2) _exit(1);
        _exit(write(1, "x", 1) < 0 && write(2, "x", 1) < 0 && read(0, &fd, 1) < 0 ? 0 : 1);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
           && WEXITSTATUS(status) == 0);
}

static void test_cut_short(void) {
    const char *path = in_dir("text");
    char message[2048] = "", expected[1024];
    int status = -1, out[2];
    pid_t child;
    ssize_t n, k;
    put_text(path, "a text");
    EXPECT(tr_watch("prog", path, err, sizeof err) == 1 && tr_cut_short() == NULL);
    EXPECT(truncate(path, 3) == 0);
    SAME(tr_cut_short(), path);
    EXPECT(rename(path, in_dir("moved")) == 0);
    put_text(path, "a"); /* another file with that name */
    EXPECT(tr_cut_short() == NULL);
    tr_watched.n = 0;
    EXPECT(tr_watch("prog", in_dir("none"), err, sizeof err) == 0);
    HOLDS(err, "none: No such file");
    put_text(path, "a text");
    EXPECT(pipe(out) == 0);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        int fd = open(path, O_RDONLY);
        const volatile char *text = (const volatile char *)mmap(NULL, 6, PROT_READ, MAP_SHARED, fd,
                                                                0);
        setrlimit(RLIMIT_CORE, &none);
        dup2(out[1], 2);
        if (!tr_watch("prog", path, err, sizeof err) || truncate(path, 0) != 0) _exit(9);
        _exit(text[0]); /* reads a page that no longer exists */
    }
    close(out[1]);
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1);
    for (n = 0; (k = read(out[0], message + n, sizeof message - 1 - (size_t)n)) > 0; n += k) {
    }
    message[n] = 0;
    close(out[0]);
    snprintf(expected, sizeof expected, "\nprog: the text %s was truncated while it was being read",
             path);
    HOLDS(message, expected);
    tr_watched.n = 0;
    signal(SIGBUS, SIG_DFL);
}


// >>formats and terminal

static void fold(const char *text, size_t width, const char *expected, int line) {
    char folded[256];
    snprintf(folded, sizeof folded, "%s", text);
    tr_fold(folded, width);
    test_same(folded, expected, __FILE__, line);
}

#define FOLDS(text, width, expected) fold(text, width, expected, __LINE__)

static void test_fold(void) {
    FOLDS("sized by the text: --batch-sz 32", 0, "sized by the text: --batch-sz 32");
    FOLDS("sized by the text: --batch-sz 32", 33, "sized by the text: --batch-sz 32");
    FOLDS("sized by the text: --batch-sz 32", 32, "sized by the text: --batch-sz\n32");
    FOLDS("sized by the text: --batch-sz 32", 24, "sized by the text:\n--batch-sz 32");
    FOLDS("sized by the text: --batch-sz 32", 14, "sized by the\ntext:\n--batch-sz 32");
    FOLDS("one\ntwo three", 8, "one\ntwo\nthree");
    FOLDS("a-word-that-is-longer than it", 8, "a-word-that-is-longer\nthan it");
    FOLDS("\xc3\xa4\xc3\xb6\xc3\xbc xyz abc", 8, "\xc3\xa4\xc3\xb6\xc3\xbc xyz\nabc");
    FOLDS("", 8, "");
}

static void test_formats(void) {
    static const struct {
        double x;
        const char *duration, *bytes, *count;
    } t[] = {{0, "0.0s", "0 B", "0"},
             {4.24, "4.2s", "4 B", "4"},
             {9.94, "9.9s", "10 B", "10"},
             {9.96, "10s", "10 B", "10"},
             {59.6, "1m00s", "60 B", "60"},
             {192, "3m12s", "192 B", "192"},
             {999.4, "16m39s", "999 B", "999"},
             {999.6, "16m40s", "1000 B", "1.0k"},
             {3599.7, "1h00m", "3.5 KiB", "3.6k"},
             {7500, "2h05m", "7.3 KiB", "7.5k"},
             {86399.6, "1d00h", "84.4 KiB", "86.4k"},
             {273600, "3d04h", "267.2 KiB", "273.6k"},
             {999960, "11d13h", "976.5 KiB", "1.0M"},
             {1048575, "12d03h", "1.0 MiB", "1.0M"},
             {3435973836.8, "39768d05h", "3.2 GiB", "3.4G"},
             {1e30, "?", "867361.7 EiB", "1000000000000.0E"},
             {-1, "?", "?", "?"},
             {(double)NAN, "?", "?", "?"},
             {HUGE_VAL, "?", "?", "?"}};

    char out[TR_TEXT_MAX];
    size_t i;
    for (i = 0; i < sizeof t / sizeof *t; i++) {
        SAME(tr_duration(out, t[i].x), t[i].duration);
        /* tr_bytes and tr_count of larger values are only tested for overflow, below */
        if (t[i].x >= 1e30) continue;
        SAME(tr_bytes(out, t[i].x), t[i].bytes);
        SAME(tr_count(out, t[i].x), t[i].count);
    }
    EXPECT(strlen(tr_count(out, 1e300)) < TR_TEXT_MAX
           && strlen(tr_bytes(out, DBL_MAX)) < TR_TEXT_MAX);
    SAME(tr_fixed(out, 1.2345, 3), "1.234");
    SAME(tr_fixed(out, -NAN, 3), "nan");
    SAME(tr_fixed(out, -HUGE_VAL, 3), "-inf");
    SAME(tr_fixed(out, 1e300, 3), "1.000e+300");
}

static tr_progress progress(void) {
    tr_progress p;
    memset(&p, 0, sizeof p);
    p.step = 1200;
    p.steps = 5000;
    p.loss = 1.234;
    p.metric = 1.78;
    p.unit = "bpb";
    p.lr = 0.07;
    p.tokens_per_s = 12345;
    p.left = 192;
    return p;
}

static void test_terminal(void) {
    tr_term t;
    tr_rate r;
    tr_progress p = progress();
    char line[512];
    const char *path = in_dir("pipe");
    FILE *f;
    int i;
    tr_progress_line(line, sizeof line, &p);
    SAME(line, "step 1200/5000  loss 1.234  1.780 bpb  lr 7.0e-02  12.3k tok/s  left 3m12s");
    p.unit = NULL;
    p.left = -1;
    p.steps = 0;
    p.loss = NAN;
    tr_progress_line(line, sizeof line, &p);
    SAME(line, "step 1200  loss nan  lr 7.0e-02  12.3k tok/s");

    /* If the output is not a terminal, only plain lines are printed, when they are
       due. */
    f = fopen(path, "wb");
    EXPECT(f != NULL);
    if (f == NULL) return;
    tr_term_open(&t, f);
    EXPECT(!t.tty);
    fputs("before\n", f);
    tr_show(&t, &p, 0);
    tr_show(&t, &p, 1);
    tr_say(&t, "saved %s", "x");
    tr_show(&t, &p, 1);
    tr_term_close(&t);
    fclose(f);
    SAME(get_file(path, NULL),
         "before\nstep 1200  loss nan  lr 7.0e-02  12.3k tok/s\nsaved x\n"
         "step 1200  loss nan  lr 7.0e-02  12.3k tok/s\n");

    tr_rate_start(&r, 100);
    EXPECT(tr_rate_left(&r, 10) == -1 && tr_rate_tokens(&r) == 0);
    for (i = 1; i <= 1000; i++) tr_rate_add(&r, 100 + 0.5 * i, 1, 64);
    EXPECT(fabs(tr_rate_tokens(&r) - 128) < 1e-6 && fabs(tr_rate_left(&r, 10) - 5) < 1e-6);
    /* a long evaluation, which must not count */
    tr_rate_skip(&r, 5000);
    /* steps at half the speed */
    for (i = 1; i <= 200; i++) tr_rate_add(&r, 5000 + 1.0 * i, 1, 64);
    EXPECT(fabs(tr_rate_tokens(&r) - 64) < 1 && fabs(tr_rate_left(&r, 10) - 10) < 0.1);
    /* a clock that jumps back */
    tr_rate_add(&r, 0, 1, 64);
    EXPECT(tr_rate_tokens(&r) > 0);
}

/* The progress line must never be longer than the terminal's width. On a narrow
   terminal, the less important parts must be omitted first. */
static void test_live(void) {
    tr_progress p = progress();
    char line[512];
    size_t width, last = 0;
    tr_progress_live(line, sizeof line, &p, 79);
    SAME(line, "step 1200/5000  [====>               ]  24%  1.780 bpb  12.3k tok/s  left 3m12s");
    p.best = 1.812;
    tr_progress_live(line, sizeof line, &p, 79);
    SAME(line, "step 1200/5000  [=>      ]  24%  1.780 bpb  best 1.812  12.3k tok/s  left 3m12s");
    tr_progress_live(line, sizeof line, &p, 200);
    HOLDS(line, "step 1200/5000  [=======>                      ]  24%");
    HOLDS(line, "left 3m12s  lr 7.0e-02");
    for (width = 200; width > 0; width--) {
        size_t n;
        tr_progress_live(line, sizeof line, &p, width);
        n = strlen(line);
        EXPECT(n <= width && strchr(line, '\n') == NULL);
        if (width >= 15) HOLDS(line, "24%  1.780 bpb");
        last = n;
    }
    EXPECT(last == 1);
    tr_progress_live(line, sizeof line, &p, 62);
    SAME(line, "[=>     ]  24%  1.780 bpb  best 1.812  12.3k tok/s  left 3m12s");
    p.step = 5000;
    tr_progress_live(line, sizeof line, &p, 79);
    HOLDS(line, "=]  100%  ");
    p.unit = NULL;
    p.steps = 0;
    p.left = -1;
    p.loss = NAN;
    p.best = NAN;
    tr_progress_live(line, sizeof line, &p, 79);
    SAME(line, "step 5000  loss nan  12.3k tok/s  lr 7.0e-02");
}

static void test_pty(void) {
    int master = posix_openpt(O_RDWR | O_NOCTTY), slave = -1;
    char got[4096];
    const char *expected;
    struct winsize w;
    struct pollfd p1;
    tr_progress p = progress();
    tr_term t;
    FILE *f;
    size_t have = 0;
    ssize_t n;
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0
        || (slave = open(ptsname(master), O_RDWR | O_NOCTTY)) < 0) {
        printf("skipped: the terminal line (no pseudo terminal)\n");
        if (master >= 0) close(master);
        return;
    }
    memset(&w, 0, sizeof w);
    w.ws_col = 31;
    w.ws_row = 24;
    EXPECT(ioctl(slave, TIOCSWINSZ, &w) == 0);
    EXPECT(setenv("TERM", "xterm", 1) == 0);
    f = fdopen(slave, "w");
    tr_term_open(&t, f);
    EXPECT(t.tty);
    tr_show(&t, &p, 0);
    /* not drawn, because it is too soon */
    tr_show(&t, &p, 0);
    tr_say(&t, "saved");
    tr_term_close(&t);
    expected = "\r24%  1.780 bpb  left 3m12s\033[K"
             "\r\033[Ksaved\r\n"
             "\r24%  1.780 bpb  left 3m12s\033[K\r\n";
    while (have < strlen(expected)) { /* because the text may arrive in parts */
        p1.fd = master;
        p1.events = POLLIN;
        p1.revents = 0;
        if (poll(&p1, 1, 10000) <= 0 || (n = read(master, got + have, sizeof got - 1 - have)) <= 0)
            break;
        have += (size_t)n;
    }
    got[have] = 0;
    SAME(got, expected);
    fclose(f);
    close(master);
}


// >>board: event files for TensorBoard, read by independent code

static uint64_t le(const unsigned char *p, int n) {
    uint64_t x = 0;
    while (n-- > 0) x = x << 8 | p[n];
    return x;
}

/* Returns the masked CRC-32C. Unlike train.h, this function computes it with a table. */
static uint32_t crc_again(const unsigned char *p, size_t n) {
    uint32_t t[256], c, i, k;
    for (i = 0; i < 256; i++) {
        for (c = i, k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        t[i] = c;
    }
    for (c = ~0u; n > 0; n--) c = t[(c ^ *p++) & 255] ^ c >> 8;
    c = ~c;
    return (uint32_t)((c >> 15 | c << 17) + 0xa282ead8u);
}

typedef struct {
    double wall;
    uint64_t step, status;
    float value;
    char version[32], tag[64];
} event;

static uint64_t varint(const unsigned char **p) {
    uint64_t x = 0;
    int shift = 0;
    do {
        x |= (uint64_t)(**p & 127) << shift;
        shift += 7;
    } while (*(*p)++ & 128);
    return x;
}

static void read_message(const unsigned char *p, size_t n, int depth, event *e) {
    const unsigned char *end = p + n;
    uint32_t bits;
    while (p < end) {
        uint64_t key = varint(&p), len;
        unsigned field = (unsigned)(key >> 3);
        switch (key & 7) {
        case 0:
            len = varint(&p);
            if (depth == 0 && field == 2) e->step = len;
            if (depth == 9) e->status = len;
            break;
        case 1:
            len = le(p, 8);
            memcpy(&e->wall, &len, 8);
            p += 8;
            break;
        case 5:
            bits = (uint32_t)le(p, 4);
            memcpy(&e->value, &bits, 4);
            p += 4;
            break;
        case 2:
            len = varint(&p);
            if (depth == 0 && field == 3) {
                memcpy(e->version, p, len < 31 ? len : 31);
            } else if (depth == 2 && field == 1) {
                memcpy(e->tag, p, len < 63 ? len : 63);
            } else
                read_message(p, len, depth == 0 && field == 7 ? 9 : depth + 1, e);
            p += len;
            break;
        default:
            EXPECT(!"wire type");
            return;
        }
    }
}

/* Reads at most n_max records of the event file in a directory into e. Returns the
   number of records, or -1 if the framing is wrong. */
static int read_events(const char *where, event *e, int n_max) {
    DIR *d = opendir(where);
    struct dirent *entry;
    char path[1024] = "";
    size_t n, at = 0;
    int count = 0;
    const unsigned char *p;
    while (d != NULL && (entry = readdir(d)) != NULL)
        if (strncmp(entry->d_name, "events.out.tfevents.", 20) == 0)
            snprintf(path, sizeof path, "%.500s/%.400s", where, entry->d_name);
    if (d != NULL) closedir(d);
    p = (const unsigned char *)get_file(path, &n);
    if (p == NULL) return -1;
    memset(e, 0, (size_t)n_max * sizeof *e);
    while (at < n) {
        uint64_t len;
        if (n - at < 16) return -1;
        len = le(p + at, 8);
        if (le(p + at + 8, 4) != crc_again(p + at, 8) || len > n - at - 16) return -1;
        if (le(p + at + 12 + len, 4) != crc_again(p + at + 12, (size_t)len)) return -1;
        if (count < n_max) read_message(p + at + 12, (size_t)len, 0, e + count);
        count++;
        at += 16 + (size_t)len;
    }
    return count;
}

static void test_board(const char *keep) {
    tr_board b, second;
    event e[8];
    char where[1024];
    size_t n;
    EXPECT(tr_crc32c("123456789", 9) == 0xE3069283u && tr_crc32c("", 0) == 0);
    /* a test value from RFC 3720 */
    EXPECT(tr_crc32c("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32)
           == 0x8A9136AAu);
    EXPECT(tr_crc32c_masked("123456789", 9) == crc_again((const unsigned char *)"123456789", 9));

    EXPECT(tr_board_open(&b, NULL, 0, err, sizeof err) == 1 && tr_board_scalar(&b, "x", 1, 1) == 1
           && tr_board_close(&b) == 1);

    snprintf(where, sizeof where, "%.500s/run", keep != NULL ? keep : in_dir("tb/a"));
    EXPECT(tr_board_open(&b, where, 0, err, sizeof err) == 1);
    EXPECT(tr_board_scalar(&b, "train/loss", 1, 2.5) == 1);
    /* Events must be written before the file is closed. */
    EXPECT(read_events(where, e, 8) == 2);
    EXPECT(tr_board_scalar(&b, "train/bpb", 300, 1e300) == 1);
    EXPECT(tr_board_scalar(&b, "eval/loss", 9000000000u, NAN) == 1);
    EXPECT(tr_board_scalar(&b, "eval/loss", UINT64_MAX, -1) == 1);
    EXPECT(tr_board_close(&b) == 1);
    EXPECT(read_events(where, e, 8) == 5);
    SAME(e[0].version, "brain.Event:2");
    SAME(e[1].tag, "train/loss");
    EXPECT(e[1].step == 1 && e[1].value == 2.5f);
    EXPECT(e[1].wall > 1.6e9 && e[1].wall < 1e11);
    EXPECT(e[2].step == 300 && e[2].value > FLT_MAX);
    EXPECT(e[3].step == 9000000000u && isnan(e[3].value));
    EXPECT(e[4].step == (uint64_t)INT64_MAX && e[4].value == -1);
    SAME(e[4].tag, "eval/loss");

    snprintf(where, sizeof where, "%.500s/resumed", keep != NULL ? keep : in_dir("tb"));
    EXPECT(tr_board_open(&b, where, 20, err, sizeof err) == 1);
    EXPECT(tr_board_scalar(&b, "train/loss", 21, 2) == 1 && tr_board_close(&b) == 1);
    EXPECT(read_events(where, e, 8) == 3);
    EXPECT(e[1].step == 21 && e[1].status == 1);
    EXPECT(e[2].step == 21 && e[2].value == 2);

    /* Two event files created in the same second must have different names. */
    if (keep == NULL) {
        EXPECT(tr_board_open(&b, in_dir("tb/two"), 0, err, sizeof err) == 1);
        EXPECT(tr_board_open(&second, in_dir("tb/two/"), 0, err, sizeof err) == 1);
        EXPECT(b.out.path != NULL && second.out.path != NULL
               && strcmp(b.out.path, second.out.path) != 0);
        EXPECT(tr_board_close(&b) == 1 && tr_board_close(&second) == 1);
    }
    put_text(in_dir("plain"), "x");
    EXPECT(tr_board_open(&b, in_dir("plain/sub"), 0, err, sizeof err) == 0);
    HOLDS(err, "cannot create the directory");
    HOLDS(err, "Not a directory");
    EXPECT(tr_board_open(&b, "", 0, err, sizeof err) == 0);
    EXPECT(tr_board_scalar(&b, "x", 1, 1) == 1 && tr_board_close(&b) == 1);
    SAME(get_file(in_dir("plain"), &n), "x");
}


// >>signals and clock

/* Returns the exit code of a child that runs one of the functions below, or -1 if a
   signal ended it. The child's standard error goes to the file "stderr". */
static int in_child(void (*run)(void)) {
    int status = -1;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        int file = open(in_dir("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(file, 2);
        run();
        _exit(99);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

static void two_signals(void) {
    if (!tr_signals(0, err, sizeof err) || tr_stop_requested()) _exit(1);
    raise(SIGTERM);
    if (tr_stop_requested() != SIGTERM) _exit(2);
    raise(SIGINT);
}

static void two_terms(void) {
    if (!tr_signals(0, err, sizeof err)) _exit(1);
    raise(SIGINT);
    raise(SIGTERM);
}

/* A signal must interrupt a system call, so the handler is installed without
   SA_RESTART. */
static void interrupted_call(void) {
    struct sigaction action;
    if (!tr_signals(0, err, sizeof err) || sigaction(SIGINT, NULL, &action)) _exit(1);
    if (action.sa_flags & SA_RESTART) _exit(2);
    raise(SIGINT);
    _exit(tr_stop_requested() == SIGINT ? 0 : 3);
}

/* The first Ctrl-C must warn, the second must request a stop, and the third must end
   the process. */
static void interrupts(void) {
    if (!tr_signals(1, err, sizeof err)) _exit(1);
    raise(SIGINT);
    if (tr_stop_requested()) _exit(2);
    /* Let the warning expire, so that the next Ctrl-C warns again. */
    tr_asked.tv_sec -= TR_ASK_SECONDS + 1;
    raise(SIGINT);
    if (tr_stop_requested()) _exit(3);
    /* Keep the warning from expiring, however slow this machine is. */
    tr_asked.tv_sec += 100000;
    raise(SIGINT);
    if (tr_stop_requested() != SIGINT) _exit(4);
    raise(SIGINT);
}

/* SIGTERM must request a stop without a warning. */
static void one_term(void) {
    if (!tr_signals(1, err, sizeof err)) _exit(1);
    raise(SIGTERM);
    _exit(tr_stop_requested() == SIGTERM ? 0 : 2);
}

static void test_signals(void) {
    EXPECT(in_child(two_signals) == 130);
    EXPECT(in_child(two_terms) == 143);
    EXPECT(in_child(interrupted_call) == 0);
    SAME(get_file(in_dir("stderr"), NULL), "");
    EXPECT(in_child(interrupts) == 130);
    SAME(get_file(in_dir("stderr"), NULL),
         "\r\033[Knothing will be saved: press Ctrl-C again within 5 seconds to stop\n"
         "\r\033[Knothing will be saved: press Ctrl-C again within 5 seconds to stop\n");
    EXPECT(in_child(one_term) == 0);
    SAME(get_file(in_dir("stderr"), NULL), "");
}


// >>stop texts, hashes, names

static void test_stops(void) {
    tr_buf b;
    char text[32];
    strcpy(text, "a\\nb\\\\n\\t\\x\\");
    tr_unescape(text);
    SAME(text, "a\nb\\n\t\\x\\");
    memset(&b, 0, sizeof b);
    tr_buf_puts(&b, "one two thr");
    EXPECT(tr_stops(&b, 0, "two") && tr_stops(&b, 5, "two") && tr_stops(&b, 6, "two")
           && !tr_stops(&b, 7, "two"));
    EXPECT(!tr_stops(&b, 0, "three") && tr_stops(&b, 10, "thr") && !tr_stops(&b, 11, "thr")
           && tr_stops(&b, 0, "one"));
    EXPECT(!tr_stops(&b, 0, "") && !tr_stops(&b, 0, "one two three and more"));
    tr_buf_free(&b);
    /* published test values of FNV-1a */
    EXPECT(tr_hash(TR_HASH_BEGIN, "a", 1) == 0xaf63dc4c8601ec8cULL);
    EXPECT(tr_hash(tr_hash(TR_HASH_BEGIN, "foo", 3), "bar", 3) == 0x85944171f73967e8ULL);
}

static void test_names(void) {
    static const char *const pairs[][2] = {{"demo.safetensors", "demo.best.safetensors"},
                                           {"a.b/run", "a.b/run.best"},
                                           {"a/.hidden", "a/.hidden.best"},
                                           {"./x.y.st", "./x.y.best.st"},
                                           {"x.", "x.best."}};
    size_t i;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char *path = tr_path_with(pairs[i][0], ".best");
        SAME(path, pairs[i][1]);
        free(path);
    }
}

/* Returns whether all options of a command line are useful to a run. yes: whether the
   run uses the three options below. */
static int useful(const char *line, int yes) {
    const tr_only only[] = {{"lr", yes, "the sun"},
                            {"adapt-span", yes, "the moon"},
                            {"prompt", yes, "the stars"}};
    EXPECT(parse(line) == 1);
    return tr_check_only(&options, only, sizeof only / sizeof *only, err, sizeof err);
}

static void test_only(void) {
    EXPECT(useful("", 0) && useful("--lr|0.5|--adapt-span", 1) && useful("--steps|7", 0));
    EXPECT(!useful("--lr|0.5", 0));
    SAME(err, "--lr has no effect: it applies only to the sun");
    EXPECT(!useful("--adapt-span", 0) && !useful("--prompt|x", 0));
    EXPECT(useful("--no-adapt-span", 0)); /* an option that is turned off has no effect */
    /* A preset may set options that the run does not use. */
    EXPECT(useful("--preset|enwik8_small", 0));
}

static void test_clock(void) {
    double a = tr_seconds();
    struct timespec nap = {0, 2000000};
    nanosleep(&nap, NULL);
    EXPECT(tr_seconds() - a >= 0.002);
}

int main(int argc, char **argv) {
    if (!dir_create("train_h")) return 1;
    test_values();
    test_other_names();
    test_name_table();
    test_bad_options();
    test_some();
    test_presets();
    test_tables();
    test_help();
    test_configuration();
    test_changes();
    test_initial_weights();
    test_set();
    test_set_adopted();
    test_set_help();
    test_json_write();
    test_utf8();
    test_json_read();
    test_log();
    test_log_resumed();
    test_log_errors();
    test_replace();
    test_leftovers();
    test_first_bytes();
    test_links();
    test_targets();
    test_claims();
    test_streams();
    test_cut_short();
    test_fold();
    test_formats();
    test_terminal();
    test_live();
    test_pty();
    test_board(argc > 2 && strcmp(argv[1], "--keep") == 0 ? argv[2] : NULL);
    test_signals();
    test_clock();
    test_stops();
    test_names();
    test_only();
    remove_tree(dir);
    return test_end();
}
