/* train.h - what all trainers share: options, log, terminal, TensorBoard files, signals,
   clock. The parts are in train/.

   The training loop is not here: each train_*.c contains its own. The parts can be used
   in other programs. Only train/lm_*.h depend on seqtx.h; they are included only if
   TR_LM is defined. The others must work without the library's code, as in plot.c.
   Therefore buffer.h, json.h and files.h have their own UTF-8, JSON and tr_replace.

   Use:      #include "train.h"     before all other includes, or define _POSIX_C_SOURCE
                                    as 200809L yourself
   Link:     nothing beyond the C library. C99 and POSIX.1-2008; also compiles as C++11.
   License:  MIT or public domain, your choice; see LICENSE.

   MANUAL

   Outline of a trainer

       static int      nlayers, adapt_span, optim;
       static uint64_t steps;
       static double   lr;
       static const char *log_file;

       static const tr_preset presets[] = {
           {"small", "four layers, for a quick test", "nlayers=4 lr=0.03 adapt-span"},
           TR_PRESET_END
       };

       tr_opt table[] = {
           TR_GROUP("Model"),
           TR_INT("nlayers", TR_MODEL, &nlayers, 1, 1000, "number of layers"),
           TR_FLAG("adapt-span", TR_MODEL, &adapt_span, "learn a span for each head"),
           TR_GROUP("Training"),
           TR_SIZE("steps", TR_FREE, &steps, 0, TR_INF, "number of steps"),
           TR_REAL_OPEN("lr", TR_FREE, &lr, TR_OPEN_MIN, 0, TR_INF, "learning rate"),
           TR_CHOICE("optim", TR_FIXED, &optim, "adagrad|sgd|adam", "optimiser"),
           TR_TEXT("log", TR_LOCAL, &log_file, "write JSON lines to this file"),
           TR_END
       };

       tr_options o = {"train_x", "Trains model X on bytes.", table, presets,
                       "nlayers=8 steps=1000 lr=0.07", NULL, "", NULL, NULL};
       char err[TR_ERR];
       tr_log log;
       tr_term term;
       tr_rate rate;

       tr_standard_streams();                    // before any file is opened
       switch (tr_parse(&o, argc, argv, err, sizeof err)) {
       case 0: fprintf(stderr, "%s: %s\n", o.program, err); return 2;   // invalid options
       case 2: return 0;                                                // --help
       default: break;
       }
       if (!tr_log_open(&log, log_file, TR_KEEP_ALL, err, sizeof err)) { ... }
       tr_signals(0, err, sizeof err);
       tr_term_open(&term, stderr);              // standard output is for results
       tr_rate_start(&rate, tr_seconds());
       for (step = 1; step <= steps && !tr_stop_requested(); step++) {
           ... one step ...
           tr_rate_add(&rate, tr_seconds(), 1, tokens);
           tr_log_begin(&log, "train");
           tr_log_int(&log, "step", step);
           tr_log_num(&log, "loss", loss);
           if (!tr_log_end(&log)) tr_say(&term, "%s", log.err);
           tr_show(&term, &progress, step % log_every == 0);
       }
       tr_term_close(&term);

   Command line
       An option is written --name value or --name=value. A flag is written --name or
       --no-name. A set (TR_SET) is written --name, --name a,b or --no-name. Underscores
       in names are equivalent to dashes. Names that other programs use, and names of one
       letter with one dash (-p), are in train/options_names.h; defaults, presets,
       checkpoints and logs have the option's own name. An option cannot be given by two
       of its names. A numeric value must be decimal, finite, within
       the option's range, and not surrounded by blanks or other characters. If an option
       is given twice, the last value counts. --preset NAME is applied before all other
       options, wherever it appears. A value that begins with two dashes must be written
       as --name=value.

   Precedence
       The command line overrides the preset, the preset overrides the checkpoint
       (tr_options_adopt, when a run resumes), and the checkpoint overrides the
       defaults. The field `from` of each option records where its value came from.
       Defaults and presets are written like a command line without the leading dashes,
       such as "nlayers=4 adapt-span no-fast". The code that parses the command line
       also parses defaults, presets and the options stored in a checkpoint.

   Resuming
       Each option has a class, given in the second column of the table, which determines
       how checkpoints treat the option:

       class      stored  value if the option is not given  if it is given, and differs
       ---------  ------  --------------------------------  ---------------------------
       TR_LOCAL   no      default                           (nothing to compare)
       TR_HINT    yes     from the checkpoint               accepted
       TR_FREE    yes     from the checkpoint               accepted and reported
       TR_FIXED   yes     from the checkpoint               error when training resumes;
                                                            accepted otherwise
       TR_MODEL   yes     from the checkpoint               error

       TR_LOCAL is for options of a single start: threads, device, log files. TR_HINT is
       for the location of the data. TR_FREE is for options that may change during a
       run. TR_MODEL is for options without which the stored weights have no meaning. A
       run that only starts from the weights of another run (TR_INIT) takes from the
       checkpoint the options of class TR_MODEL and all options with TR_KEPT added.

   Files
       tr_replace either replaces a whole file or leaves it unchanged; it is also used to
       trim logs. tr_claim_open gives a run the exclusive right to write a file. It locks
       FILE.lock in the same directory.

   Errors
       A function that can fail returns 0 and writes one sentence to err[TR_ERR], which
       says what was attempted, on which path, and why it failed. No function ends the
       process, with two exceptions: a second signal while the first is being handled, and
       the truncation of a watched text (tr_watch). A failing log or event file does not
       stop training: only the first failure is reported, the incomplete line is removed,
       and nothing more is written to that file. */

#ifndef SEQTX_EXAMPLES_TRAIN_H
#define SEQTX_EXAMPLES_TRAIN_H

#include "train/base.h"
#include "train/buffer.h"
#include "train/json.h"
#include "train/options_names.h"
#include "train/options.h"
#include "train/options_values.h"
#include "train/options_guess.h"
#include "train/options_set.h"
#include "train/options_help.h"
#include "train/options_parse.h"
#include "train/options_checkpoint.h"
#include "train/files.h"
#include "train/log.h"
#include "train/formats.h"
#include "train/terminal.h"
#include "train/tensorboard.h"
#include "train/signals.h"

#ifdef TR_LM
#include "train/lm.h"
#include "train/lm_errors.h"
#include "train/lm_results.h"
#include "train/lm_context.h"
#include "train/lm_model.h"
#include "train/lm_text.h"
#include "train/lm_minutes.h"
#include "train/lm_groups.h"
#include "train/lm_sizes.h"
#include "train/lm_checkpoint.h"
#include "train/lm_start.h"
#include "train/lm_progress.h"
#include "train/lm_evaluate.h"
#include "train/lm_recompute.h"
#include "train/lm_sample.h"
#include "train/lm_generate.h"
#include "train/lm_watch.h"
#include "train/lm_steps.h"
#include "train/lm_chat.h"
#include "train/lm_score.h"
#include "train/lm_program.h"
#endif

#endif /* SEQTX_EXAMPLES_TRAIN_H */
