#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_checkpoint.h"
#include "files.h"
#include "log.h"
#include "terminal.h"
#include "tensorboard.h"


// >>lm: shared by trainers of language models

/* This part and those that begin with lm_ are what trainers of language models share:
   options, context, text, checkpoint, evaluation, scores, generation and conversation.
   train.h includes them only if TR_LM is defined. They require seqtx.h and seqtx_text.h
   two directories up.

       B  text streams    T  tokens per stream in a block    V  vocabulary size */

#include "../../seqtx.h"
#include "../../seqtx_text.h"

enum { TR_BYTES, TR_COMPACT, TR_CHARS, TR_WORDS, TR_SPM, TR_IDS };  /* tr_lm_opt.tokens */
enum { TR_AUTO, TR_BPC, TR_PPL, TR_WORD_PPL };                      /* tr_lm_opt.unit */
enum { TR_PASS_RANK0, TR_PASS_SHARED, TR_PASS_EACH };               /* tr_lm.share_pass */
enum { TR_BY_FILE, TR_BY_LINES, TR_BY_TEXTS, TR_BY_TOKENS };        /* tr_lm_opt.score_by */

/* Options that all trainers share. The rows of some of them differ: each trainer's table
   contains its own rows of the options below "in the trainer's words". */
typedef struct {
    const char *data, *pieces, *checkpoint, *init_from, *score, *best, *export_to;
    const char *log, *tensorboard, *out, *prompt, *stop, *plan;
    const char *freeze, *lr_of, *no_decay;
    int         tokens, join_lines, reading, unit, score_by;
    int         eval_only, no_train, threads, precision, weights, device, tf32, no_graph, tune;
    int         dry_run, list_presets, version, keep_best, interactive, shard, recompute;
    int         grow_vocab;
    uint64_t    min_count, eval_batch_sz, eval_every, eval_blocks;
    uint64_t    save_every, log_every, gpu, vocab, generate, top_k;
    uint64_t    update_every, update_after, random_segments, streams;
    uint64_t    sample_prime, sample_length, repetition_window;
    int         sample_every;
    double      max_memory, temperature, top_p, repetition_penalty, minutes, epochs;

    /* in the trainer's words */
    uint64_t    seed, steps, batch_sz, batch_split, block_sz, lr_warmup;
    int         optim, schedule;
    double      lr, lr_start, lr_min, momentum, weight_decay, grad_clip;
} tr_lm_opt;

/* The first part of every trainer's defaults. */
#define TR_LM_DEFAULTS \
    "seed=1 temperature=0.8 top-p=0.95 repetition-penalty=1 repetition-window=64 " \
    "sample-every=auto "

/* Rows of the option table. `o` is the trainer's tr_lm_opt. */
#define TR_LM_DATA(o) \
    TR_GROUP("Data"), \
    TR_TEXT("data", TR_HINT, &(o).data, \
        "a text file (its last 5 % are the test text, the 5 % before them the validation text), " \
        "or a directory with train.txt, valid.txt and test.txt. The checkpoint stores this path"), \
    TR_CHOICE("tokens", TR_MODEL, &(o).tokens, "bytes|bytes-compact|chars|words|spm|ids", \
        "what a token is. bytes-compact: only bytes that occur, with the newline as <eos>. " \
        "spm: pieces of a SentencePiece model. ids: the text consists of piece numbers, " \
        "separated by white space"), \
    TR_TEXT("pieces", TR_HINT | TR_LATER, &(o).pieces, \
        "spm: the .model file (in programs built with SENTENCEPIECE=1). ids: a .vocab file, one " \
        "piece per line. The checkpoint stores its contents"), \
    TR_FLAG("join-lines", TR_MODEL | TR_LATER, &(o).join_lines, \
        "with --tokens spm: newlines are not tokens (as in PAR's reference)"), \
    TR_SIZE("min-count", TR_MODEL, &(o).min_count, 0, TR_INF, \
        "words or characters that occur less often than this become <unk>. With 1, there is no " \
        "<unk>, and unknown ones are errors. Default: 2 if the validation or test text requires " \
        "an <unk>, otherwise 1"), \
    TR_CHOICE("data-unit", TR_FREE, &(o).unit, "auto|bpc|ppl|word-ppl", \
        "unit of the results: bits per byte, perplexity per token, or perplexity per word. auto: " \
        "perplexity per token if tokens are words or pieces, otherwise bits per byte")

/* Options for how the text is read and when parameters are updated, for trainers that
   call tr_lm_next and read t->share and t->update. */
#define TR_LM_PACE(o) \
    TR_SIZE("update-every", TR_FREE, &(o).update_every, 1, 1u << 20, \
        "number of steps per parameter update, which uses the mean of the steps' gradients"), \
    TR_SIZE("update-after", TR_FREE, &(o).update_after, 0, TR_INF, \
        "number of steps before --update-every applies; until then, every step is an update"), \
    TR_SIZE("random-segments", TR_FIXED, &(o).random_segments, 0, 1u << 20, \
        "read segments of this many blocks from random positions of the text, each starting with " \
        "an empty memory; 0: read the whole text in parallel streams")

/* For trainers that call tr_lm_next. */
#define TR_LM_STREAMS(o) \
    TR_SIZE("streams", TR_FIXED | TR_LATER, &(o).streams, 0, 1u << 30, \
        "cut the text into this many streams, a multiple of --batch-sz. They form groups of " \
        "--batch-sz streams, and each step continues another group, so that successive steps see " \
        "different parts of the text; 0: --batch-sz")

/* The optimiser; `choices` are the names of a trainer's optim_kinds. */
#define TR_LM_OPTIM(o, choices) \
    TR_CHOICE("optim", TR_FIXED, &(o).optim, choices, \
        "optimiser. muon orthogonalises the updates of the matrices in the layers; embeddings, " \
        "the output and all other parameters are updated by adamw, with the same --lr and " \
        "--weight-decay")

/* Parameter groups, after --weight-decay. */
#define TR_LM_GROUPS(o) \
    TR_LIST("freeze", TR_FIXED | TR_LATER, &(o).freeze, \
        "do not train the parameters with these names, which takes less time and memory. " \
        "Patterns are separated by commas; * is any text, [0-5] a number from 0 to 5, and " \
        "!PATTERN excludes names that the patterns before it select: '*,!layers.11.*,!out_emb.*' " \
        "trains only layer 11 and the output"), \
    TR_LIST("lr-of", TR_FREE | TR_LATER, &(o).lr_of, \
        "factors of the learning rate, such as 'in_emb.*=0.1,layers.[0-5].*=0.3'; if several " \
        "patterns match a name, the last applies"), \
    TR_LIST("no-decay", TR_FREE | TR_LATER, &(o).no_decay, \
        "no weight decay of the parameters with these names; see --freeze. default: of all " \
        "except the matrices of the layers, that is, of biases, normalisation, embeddings, " \
        "output matrices and other vectors")

/* Options for the size of a batch. */
#define TR_LM_BATCH(o) \
    TR_SIZE("batch-sz", TR_FIXED, &(o).batch_sz, 1, 1u << 30, \
        "number of parallel text streams, each of which a step continues by a block"), \
    TR_LM_STREAMS(o), \
    TR_SIZE("batch-split", TR_FIXED, &(o).batch_split, 1, 1u << 30, \
        "process the batch in this many parts, to save memory")

/* Options for the length of a run, after --steps. */
#define TR_LM_LENGTH(o) \
    TR_REAL("epochs", TR_FREE | TR_LATER, &(o).epochs, 0, 1e9, \
        "instead of a number of steps: number of passes over the training text, such as 2.5. A " \
        "pass is as many steps as it takes each stream to reach its end, where the few tokens " \
        "that do not fill a block are not read"), \
    TR_REAL("minutes", TR_FREE | TR_LATER, &(o).minutes, 0, 1e6, \
        "instead of a number of steps: train for this many minutes, such as 0.5. The learning " \
        "rate follows the share of the time that is over. The time includes ten evaluations and " \
        "four saves, but not the start of the program, pauses such as Ctrl-Z, and the final " \
        "evaluation. " \
        "The best model is saved as with --keep-best. If the model over-fits, the run ends " \
        "early"), \
    TR_TEXT("plan", TR_FREE | TR_LATER, &(o).plan, \
        "with the options of a run with --minutes: repeat it exactly, without a clock. The plan " \
        "lists the lengths that the run chose, such as 0:1000,3:2410; its checkpoint contains it " \
        "as \"plan\"")

/* Options for running and saving. The strings `zero` and `whole` complete the help:
   `zero` says what an interval of 0 steps between saves or evaluations means in a run
   with --steps, and `whole` says what 0 evaluation blocks mean. */
#define TR_LM_SAVING(o, zero, whole) \
    TR_GROUP("Running"), \
    TR_TEXT("out", TR_LOCAL, &(o).out, \
        "output directory, created if necessary. Sets --checkpoint to DIR/model.safetensors and, " \
        "in training, --log to DIR/log.jsonl and --tensorboard to DIR/tb, unless they are given"), \
    TR_TEXT("checkpoint", TR_LOCAL, &(o).checkpoint, \
        "save to this safetensors file, and resume from it if it exists; it contains every " \
        "option that affects training"), \
    TR_TEXT("init-from", TR_LOCAL, &(o).init_from, \
        "start a new run with the weights of this checkpoint (fine-tuning), or of one made by " \
        "tools/convert.py. It determines the model's options and vocabulary; the optimiser, the " \
        "schedule and the memories start afresh"), \
    TR_FLAG("grow-vocab", TR_LOCAL, &(o).grow_vocab, \
        "with --init-from: append the words or characters of the training text that the " \
        "checkpoint's vocabulary lacks. Their rows in the embedding and the output start afresh; " \
        "all other weights are kept. New ones that occur less often than --min-count (of the " \
        "checkpoint, unless it is given) become <unk>"), \
    TR_TEXT("export", TR_LOCAL, &(o).export_to, \
        "at the end, also write the model and its vocabulary to this file, without the state of " \
        "training; with --no-train, those of --checkpoint. Programs read it like a checkpoint " \
        "(stx_lm_open), and so do --no-train, --eval-only and --init-from"), \
    TR_SIZE("save-every", TR_FREE, &(o).save_every, 0, TR_INF, \
        "steps between saves; 0: " zero "; with --epochs, after each one; with --minutes, 4 " \
        "times"), \
    TR_TEXT("best", TR_LOCAL, &(o).best, \
        "also save to this file whenever an evaluation during training is the best so far"), \
    TR_FLAG("keep-best", TR_LOCAL, &(o).keep_best, \
        "like --best, with a file named after --checkpoint: run.best.safetensors for " \
        "run.safetensors"), \
    TR_SIZE("eval-every", TR_FREE, &(o).eval_every, 0, TR_INF, \
        "steps between evaluations; 0: " zero "; with --epochs, after each one; with --minutes, " \
        "10 times"), \
    TR_SIZE("eval-blocks", TR_FREE, &(o).eval_blocks, 0, TR_INF, \
        "number of blocks per evaluation during training. If given on the command line, it also " \
        "applies to the final evaluation, which otherwise covers the whole text. 0: " whole), \
    TR_SIZE("eval-batch-sz", TR_FREE, &(o).eval_batch_sz, 0, 1u << 30, \
        "number of streams in an evaluation, reduced for a short text; 0: --batch-sz / " \
        "--batch-split"), \
    TR_SIZE("log-every", TR_FREE, &(o).log_every, 0, TR_INF, \
        "steps between log records; 0: 10"), \
    TR_TEXT("log", TR_LOCAL, &(o).log, \
        "append JSON lines to this file"), \
    TR_TEXT("tensorboard", TR_LOCAL, &(o).tensorboard, \
        "write TensorBoard event files to this directory")

#define TR_LM_RUNNING(o) \
    TR_FLAG("eval-only", TR_LOCAL, &(o).eval_only, \
        "evaluate on every token of the validation and test texts, then stop"), \
    TR_TEXT("score", TR_LOCAL, &(o).score, \
        "print a tab-separated table of the likelihood of this text file (-: standard input) " \
        "under the model of --checkpoint, then stop; nats are -ln of the probability. If the " \
        "last line has no newline, one is added, so that all lines are scored the same way"), \
    TR_CHOICE("score-by", TR_LOCAL, &(o).score_by, "file|lines|texts|tokens", \
        "rows of the table of --score. file: one row; lines: one per line; texts: one per line, " \
        "each read as a separate text with an empty memory; tokens: one per token. All except " \
        "file read token by token, as --generate does. If blocks see more of the past than " \
        "single tokens do (train_par), the rows add up to the score with --eval-block-sz 1"), \
    TR_FLAG("no-train", TR_LOCAL, &(o).no_train, \
        "do not train, only --generate"), \
    TR_INT("threads", TR_LOCAL, &(o).threads, 0, 4096, \
        "number of threads; 0: all"), \
    TR_FLAG("shard", TR_LOCAL, &(o).shard, \
        "with several ranks (mpirun, docs/distributed.md), each rank stores only its share of " \
        "the optimiser's state"), \
    TR_CHOICE("precision", TR_FIXED, &(o).precision, "f32|bf16", \
        "bf16 on a CPU: the inputs of matmuls are rounded to bfloat16, everything else is float. " \
        "On a GPU: activations are stored as bfloat16, parameters and sums as float"), \
    TR_CHOICE("device", TR_LOCAL, &(o).device, "cpu|cuda", \
        "device to run on; cuda requires a program built with CUDA (make cuda)"), \
    TR_SIZE("gpu", TR_LOCAL, &(o).gpu, 0, 1023, \
        "CUDA's number of the GPU, counted from 0"), \
    TR_FLAG("tf32", TR_FREE, &(o).tf32, \
        "with --device cuda and f32: use TF32 matmuls, which are faster and less accurate"), \
    TR_FLAG("tune", TR_LOCAL, &(o).tune, \
        "with --device cuda: time the algorithms of each matmul and keep the fastest; a repeated " \
        "run may differ in the last bits"), \
    TR_FLAG("no-graph", TR_LOCAL, &(o).no_graph, \
        "with --device cuda: launch every kernel of every step, instead of replaying steps as " \
        "CUDA graphs"), \
    TR_REAL("max-memory", TR_LOCAL, &(o).max_memory, 0, 1e9, \
        "limit on the use of device memory, in GiB; 0: 90 % of the machine's memory, or all of " \
        "the GPU's"), \
    TR_SOME("recompute", TR_FREE, &(o).recompute, 4096, \
        "recompute the activations of all layers, or of the last N, in the backward pass: uses " \
        "less memory and up to a third more time, with identical results. auto: the smallest N " \
        "with which training fits in --max-memory"), \
    TR_FLAG("dry-run", TR_LOCAL, &(o).dry_run, \
        "print the size of the model, then stop"), \
    TR_SIZE("vocab", TR_LOCAL, &(o).vocab, 0, 1u << 30, \
        "vocabulary size for --dry-run without --data; 0: 256"), \
    TR_FLAG("list-presets", TR_LOCAL, &(o).list_presets, \
        "print a tab-separated table of the presets, then stop: name, layers, d, vocabulary, " \
        "parameters"), \
    TR_FLAG("version", TR_LOCAL, &(o).version, \
        "print the version, then stop")

#define TR_LM_GENERATION(o) \
    TR_GROUP("Generation"), \
    TR_SIZE("generate", TR_LOCAL, &(o).generate, 0, TR_INF, \
        "generate this many tokens at the end. Only the prompt and these tokens are written to " \
        "standard output. If --checkpoint exists and no option for training is given, nothing is " \
        "trained, as with --no-train. With --interactive: the longest answer, in tokens; 0: 256"), \
    TR_FLAG("interactive", TR_LOCAL, &(o).interactive, \
        "talk to the model of --checkpoint: it continues each line of standard input, and " \
        "remembers the conversation until an empty line or /reset; /help lists the commands. " \
        "Ctrl-C stops an answer; the end of the input ends the program"), \
    TR_TEXT("prompt", TR_LOCAL, &(o).prompt, \
        "text to continue; -: standard input, without its final newline. With --interactive: the " \
        "beginning of each conversation"), \
    TR_REAL("temperature", TR_LOCAL, &(o).temperature, 0, 1000, \
        "temperature of sampling; 0: always the most likely token"), \
    TR_SIZE("top-k", TR_LOCAL, &(o).top_k, 0, TR_INF, \
        "sample from this many most likely tokens; 0: all"), \
    TR_REAL("top-p", TR_LOCAL, &(o).top_p, 0, 1, \
        "sample from the most likely tokens with this total probability; 0 or 1: all"), \
    TR_REAL("repetition-penalty", TR_LOCAL, &(o).repetition_penalty, 1, 100, \
        "divide the positive logits of recent tokens by this, and multiply the negative ones by " \
        "it, before the temperature applies (logits are measured from their mean). 1: off; 1.1 " \
        "to 1.3 is usual"), \
    TR_SIZE("repetition-window", TR_LOCAL, &(o).repetition_window, 0, 1u << 20, \
        "number of recent tokens for --repetition-penalty, including the prompt; 0: all"), \
    TR_CHOICE("weights", TR_LOCAL, &(o).weights, "f32|bf16|int8", \
        "without training: round the model's matrices to bfloat16, or to 8 bits with one scale " \
        "per 32 values. If the model is larger than the caches, this speeds up generation, which " \
        "then reads half or a quarter of the bytes; --eval-only measures the loss of accuracy"), \
    TR_TEXT("stop", TR_LOCAL, &(o).stop, \
        "end a text or an answer after this string, in which \\n, \\t and \\\\ are a newline, a " \
        "tab and a backslash. Without it, only --generate limits a text; <eos> does not end it")

/* Options for samples during training. */
#define TR_LM_SAMPLING(o) \
    TR_SOME("sample-every", TR_FREE | TR_LATER, &(o).sample_every, 1 << 30, \
        "during training, write samples to standard error: on: with each evaluation; N: every N " \
        "steps; 0: never; auto: with each evaluation, but only on a terminal, and for less than " \
        "1 % of the time. Samples do not change the training"), \
    TR_SIZE("sample-prime", TR_FREE | TR_LATER, &(o).sample_prime, 0, 1u << 30, \
        "a sample continues this many tokens of the validation text, from a random position; 0: " \
        "256 with --sample-every N, otherwise none: a sample begins with a new line"), \
    TR_SIZE("sample-length", TR_FREE | TR_LATER, &(o).sample_length, 0, TR_INF, \
        "length of a sample, in tokens; 0: 500 with --sample-every N, otherwise 200")

/* The last paragraph of the help. */
#define TR_LM_AFTER \
    "To resume a run, repeat the command, or give --checkpoint without --generate: the file " \
    "contains the " \
    "options that affect training, and they apply unless they are given again. The number of " \
    "steps, the learning rate, dropout, penalties and the intervals of saving, evaluation and " \
    "logging may change, and changes are reported; a different model, optimiser, batch, seed or " \
    "precision is refused. " \
    "Results and generated text are written to standard output, progress and everything else to " \
    "standard error; with --generate, results are also written to standard error. " \
    "Exit code: 0 success; 1 failed while running; 2 refused before anything was written; " \
    "130 stopped by Ctrl-C, 143 by SIGTERM, 129 by the end of its terminal. " \
    "The first Ctrl-C finishes the step and saves; without --checkpoint, on a terminal, it asks " \
    "for a second one."

/* The short help. A test checks that it fits on a screen of 24 lines. */
static const tr_basic tr_lm_basic[] TR_UNUSED = {
    {"data", "FILE", "text to train on; its last 10 % measure the result"},
    {"checkpoint", "FILE", "save here, and resume from here; the model to use"},
    {"minutes", "X", "train for this many minutes"},
    {"epochs", "X", "or: read the text this many times"},
    {"preset", "NAME", "model and settings of a paper (--help presets)"},
    {"init-from", "FILE", "fine-tune: start from the weights of this model"},
    {"threads", "N", "number of threads; 0: all"},
    {"no-train", "", "only use the model of --checkpoint"},
    {"generate", "N", "write this many tokens"},
    {"prompt", "TEXT", "text to continue"},
    {"temperature", "X", "0: the likeliest tokens; 1: as varied as the text"},
    {"interactive", "", "talk to the model"},
    {"score", "FILE", "print how likely a text is under the model"},
    {NULL, NULL, NULL}
};

static const tr_brief tr_lm_brief TR_UNUSED = {
    tr_lm_basic,
    "--data my.txt -o run.safetensors --minutes 10\n"
    "-m run.safetensors -p \"Once upon\" -n 200\n"
    "-m run.safetensors --interactive\n"
};

typedef struct tr_lm tr_lm;

/* An entry of the plan of a run with --minutes: see lm_minutes.h. */
enum { TR_PLAN_MAX = 1024, TR_PLAN_GUESS = 1000 };

typedef struct {
    uint64_t step, steps;       /* from `step` on, the run was to have `steps` steps */
} tr_lm_entry;

/* The speed of the steps of a run with --minutes. */
typedef struct {
    double   step;              /* seconds per step, at the last check of the plan; 0: unknown */
    double   seconds;           /* time of the steps since then, without stalls */
    uint64_t steps;             /* their number */
    double   used, done;        /* seconds of training, and progress, at the last check */
    int      stalled;           /* 1: the last step was a stall */
} tr_lm_pace;

/* Settings for a training text of at most `tokens` tokens and a run of at most `seconds`
   processor seconds; 0: no limit. They replace the defaults if no preset is given. */
typedef struct {
    double      tokens, seconds;
    const char *settings;       /* name=value ..; NULL at the end of a list */
} tr_lm_sized;

/* What the trainer of a model family provides. Functions return 1, or 0 with t->err or
   the context's error set. */
typedef struct {
    const char  *format;        /* format name of the family's checkpoints, such as "seqtx.sru.1" */
    const char  *states;        /* prefix of a state's entries in checkpoints, such as
                                   "state" */
    const int   *adapt_io;      /* the value of --adapt-io, or a constant 0. If 1, the
                                   sizes of a step depend on its tokens, so steps cannot
                                   be replayed */
    const char **cutoffs;       /* the value of --adapt-io-cutoffs; NULL: no such option */
    int          order, eos_first;      /* with --adapt-io: the fields of stx_vocab_desc
                                           that order the words. Without it, words are in
                                           the order of occurrence */
    const tr_lm_sized *sized;   /* list of settings, of which the first that fits applies */
    double       tokens;        /* number of tokens that a run of about 300 processor seconds
                                   reads */

    int        (*check)(tr_lm *t);      /* refuses incompatible options */
    void       (*plan)(tr_lm *t);       /* sets t->steps, t->schedule, and when and how to
                                           save and evaluate */
    size_t     (*count)(tr_lm *t, size_t vocab);        /* number of parameters; 0: see t->err */
    void       (*shape)(const tr_lm *t, char *line, size_t size, double *states);
                                        /* for --dry-run: writes the second line of the
                                           output to `line`. *states receives the number
                                           of elements in the states */
    int        (*make)(tr_lm *t);       /* creates t->lm and, for training, calls
                                           tr_lm_make */
    void       (*train)(tr_lm *t);      /* the training loop */
    void       (*learned)(const tr_lm *t, FILE *out);   /* prints what the model learned */
    size_t       size;          /* size of the trainer's struct, which begins with a tr_lm */
} tr_lm_kind;

/* Sizes of one text. Padding (--pad-id) is included only in `all`: it has no loss,
   bytes or words. */
typedef struct tr_lm_counts {
    double all, tokens, bytes, words;
} tr_lm_counts;

/* Results of an evaluation other than the mean loss. */
typedef struct tr_lm_scored {
    double tokens;              /* number of tokens with a loss */
    double batch_ppl;           /* mean of the batch perplexities, as TensorFlow reports it; with
                                   mean_of_all, padding is included in the losses of the
                                   batches */
} tr_lm_scored;

/* The state of a run. The trainer's struct begins with a tr_lm. */
struct tr_lm {
    tr_options       *options;
    const tr_lm_opt  *opt;
    const tr_lm_kind *kind;
    int          training;
    int          evaluating;    /* 1: this run only evaluates, on the whole texts */
    int          only_generates;        /* 1: see tr_lm_only_generates */
    stx_ctx     *x;

    /* ranks */
    stx_launch_info start;      /* the rank of this process and the number of ranks: see >>api:
                                   group in seqtx.h */
    int          agreed;        /* the signal at which all ranks stop; 0: none */
    int          save_due;      /* 1: save after the next update */
    int          share_pass;    /* which ranks read which streams in tr_lm_pass. TR_PASS_RANK0:
                                   rank 0 reads all; TR_PASS_SHARED: each rank reads a
                                   share; TR_PASS_EACH: each rank reads all */
    int          whole_pass;    /* 1: an evaluation is not divided among the ranks, because
                                   its random values depend on the stream index. Set by
                                   kind->make */
    void       **gathered;      /* (gathered_count) the states of all ranks' streams, while a
                                   checkpoint is written */
    size_t       gathered_count;

    /* text and model */
    stx_vocab   *vocab;
    stx_vocab   *base;          /* with --grow-vocab: the vocabulary of --init-from */
    size_t       grown;         /* number of pieces that `vocab` has more than `base` */
    stx_corpus  *text[3];       /* training, validation and test text; NULL: no such text */
    char        *file[3];       /* paths of the memory-mapped texts; NULL for other texts */
    stx_lm       lm;            /* the model */
    stx_batches *batches;       /* batches of the training text */
    stx_optim   *optim;
    stx_schedule schedule;

    /* batches */
    size_t       parts;         /* number of parts of a batch (--batch-split) */
    size_t       pieces;        /* number of pieces of an update. Part p of block k is
                                   in[k * parts + p] and out[k * parts + p] */
    size_t       groups;        /* --streams / --batch-sz: steps alternate between this many
                                   groups of streams */
    void       **states;        /* (groups, parts) memories of this rank's streams */
    void       **state;         /* (parts) for each part, the memory of this step's streams */
    stx_ids    **in, **out;     /* (pieces) tokens and targets for one update */
    int32_t     *tokens, *targets;      /* tokens and targets of all ranks, in host memory, one
                                           block after another, in the layout of
                                           stx_batches_next */
    int32_t     *all_tokens, *all_targets;      /* (groups) the same for all groups; tokens and
                                                   targets point to this step's group */
    stx_batches_state all_from; /* the state of `batches` before it read them */
    int          all_status;    /* STX_BATCH_.. of that call; STX_BATCH_END before the first */

    /* evaluation and saving, set by plan */
    size_t       eval_block;    /* tokens per stream in an evaluation block */
    size_t       eval_window;   /* argument `window` for creating evaluation and
                                   generation states */
    int          eval_literal;  /* 1: evaluate like the reference code */
    int          blocks_see_more;       /* 1: a token attends to more of the past when
                                           it is read in a block than when it is read
                                           singly, as in generation */
    uint64_t     log_every, eval_every, save_every;     /* intervals in steps; 0: never */
    uint64_t     eval_blocks;   /* number of blocks in an evaluation; 0: the whole text */
    uint64_t     timed_blocks;  /* the same for a run with --minutes, once it is known */

    /* progress */
    uint64_t     logged;        /* updates since the last log record */
    uint64_t     saved;         /* step of the last save */
    size_t       bad_updates;   /* consecutive updates that were not finite */
    size_t       packed;        /* size of the rounded matrices in bytes (--weights) */
    int          unk_added;     /* 1: an <unk> was added because a text required one */
    double       sum;           /* sum of the losses since the last log record */
    double       loss;          /* loss of the last step */
    uint64_t     first, step, steps;    /* first: step at which this process began; step: current
                                           step; steps: last step of the run */
    double       lr;            /* learning rate of this step */

    /* --minutes and --plan */
    tr_lm_entry  plan[TR_PLAN_MAX];
    size_t       plan_count;    /* number of entries; 0: all steps are equal */
    double       used;          /* seconds of training before this process */
    double       apart;         /* seconds of evaluation and saving in this process */
    tr_lm_pace   pace;
    double       sampling;      /* seconds of samples in this process */

    /* --recompute */
    size_t       layers, recompute;     /* number of layers; the last `recompute` of them are
                                           recomputed */
    size_t       predicted;     /* with --recompute auto: predicted peak in bytes; otherwise 0 */
    size_t       overhead;      /* memory in the context that rehearsals do not include,
                                   in bytes */
    void        *before_make;   /* a copy of this struct, made before the call of kind->make */
    int          rehearsal;     /* number of ranks in a rehearsal (tr_lm_rehearse); 0: a
                                   real run */
    size_t       peak, settled; /* in a rehearsal: the peak in bytes, and the number of steps
                                   since it last rose */

    /* updates of several steps */
    int          update;        /* 1: this step updates the parameters */
    double       share;         /* factor of this step's gradient: 1 / steps per update */
    stx_real    *grads;         /* (grads_size) all gradients, if an update has several
                                   steps; otherwise NULL */
    size_t       grads_size;

    /* training text */
    uint64_t     fingerprint;
    size_t       use;           /* the weights are trained on this many tokens from the
                                   beginning of the training text; 0: all */
    double       weight_steps;  /* share of the steps in which the weights are trained; 0: all */

    /* set by the trainer's make or plan */
    int        (*save_more)(tr_lm *t, stx_writer *w);   /* writes further entries of the
                                                           checkpoint; may be NULL */
    int        (*load_more)(tr_lm *t, const stx_file *f);
    int          no_evaluation; /* 1: without training, only the output of kind->learned
                                   is printed */
    int          no_samples;    /* 1: the model cannot generate samples during training */
    int          more_figures;  /* 1: with perplexity per token, also report the
                                   perplexity per word and the mean perplexity of the
                                   batches */
    int32_t      pad_id;        /* the token that has no loss; -1: none */
    int          mean_of_all;   /* 1: means of losses include padding tokens, with a loss
                                   of 0 */

    /* results */
    tr_lm_counts counts[3];     /* sizes of each text */
    int          unit;          /* TR_BPC, TR_PPL or TR_WORD_PPL */
    double       best;          /* lowest validation loss, for --best; NaN: none */
    double       best_seen;     /* lowest validation loss of any evaluation; NaN: none */
    uint64_t     best_step;     /* the step of that evaluation */
    uint64_t     no_better;     /* consecutive evaluations since then */
    uint64_t     evaluated, blocks;     /* step and number of blocks of the last evaluation */
    int          last;          /* 1: from now on, evaluations give the final results of the run */
    char         result[200];   /* the line that reports the last evaluation */
    int          not_replayed;  /* consecutive steps that ran without a CUDA graph */
    int          note_reported; /* 1: the reason for not_replayed was reported */

    /* files */
    int          lost;          /* 1: generated text could not be written */
    int          begun;         /* 1: log and event file are open. An error is then a failure of the
                                   run (exit code 1), not of its start (exit code 2) */
    tr_claim     claim[3];      /* claims on the files that tr_lm_output lists, once begun is 1 */
    char         found_seal[32];        /* checksum of the --checkpoint file when it was opened;
                                           "": no file */
    char        *config;        /* the options as JSON, for the checkpoint */
    char        *made_dir;      /* the directory of --out, if this run created it */
    char        *stop;          /* --stop with its escapes decoded */
    char        *prompt;        /* text of --prompt */
    size_t       prompt_len;
    tr_adopted   adopted;       /* result of tr_options_adopt */
    tr_buf       sized;         /* the options that were chosen for the size of the training
                                   text, as text */
    tr_log       log;
    tr_term      term;
    tr_board     board;
    tr_rate      rate;
    double       began;         /* time when training began */
    char         err[TR_ERR];
};
