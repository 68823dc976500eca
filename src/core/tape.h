#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/cuda.h"
#include "loops.h"
#include "platform.h"
#include "context.h"
#include "arena.h"
#include "tensors.h"


// >>tape

/* A node (stx__node, >>context) records one op on the tape: its outputs `y` and `more`,
   its inputs, and its backward function `back`. x->tape.last is the newest node;
   stx_begin empties the tape. An op records a node only if one of its inputs has
   needs_grad. For stx_recompute, this is an input of any op in its function (stx__uses).

   stx__run_backward sets x->tape.recording to 0. It then pops the nodes, newest first,
   and calls `back` if an output of the node has a gradient. This gradient is complete:
   all ops that read the output were recorded after the node, so their nodes were popped
   before it. For each input, `back` calls stx__grad or one of its variants, which creates
   the input's gradient on first use. `back` adds to this gradient, or overwrites it if
   the variant returns it as fresh. After that, the output gradients are no longer needed,
   and their buffers are recycled (x->tape.free_grads). Gradients of parameters and
   variables remain. The pass leaves the tape empty, because it also removes the nodes
   that no gradient has reached.

   After an error, the pass stops and leaves the remaining nodes on the tape. Gradients
   that could not be created are NULL, and kernels skip them. If a kernel requires one of
   them, `back` must return before the kernel when x->error.code is set. */

/* Returns whether t is a parameter or a view of one. The gradients of such tensors
   outlive the step. */
static int stx__has_param_grad(const stx_tensor *t) {
    return t->is_param || t->view_of;
}

/* Returns the current address of the gradient of a parameter or of a view of one.
   stx_params_grads can move this gradient. */
static stx_real *stx__param_grad(const stx_ctx *x, const stx_tensor *t) {
    return t->view_of ? stx_offset_ptr(x, t->view_of->grad, t->view_offset) : t->grad;
}

/* What the first run of a recomputed function (stx_recompute) shows about its gradients:
   whether there are any, and the smallest address range that contains all parameter
   gradients to which it will add. backward_begin (>>group) needs the range before the
   function's second run. */
typedef struct stx__uses {
    int any; /* 1: an input of an op requires a gradient */
    const stx_real *lo, *hi;
} stx__uses;

static void stx__add_uses(stx__uses *u, stx_tensor *const *in, int count) {
    int i;
    for (i = 0; i < count; i++) {
        if (!in[i] || !in[i]->needs_grad) continue;
        u->any = 1;
        if (!stx__has_param_grad(in[i])) continue;
        if (!u->lo || in[i]->grad < u->lo) u->lo = in[i]->grad;
        if (in[i]->grad + in[i]->size > u->hi) u->hi = in[i]->grad + in[i]->size;
    }
}

/* Records the op that computed y on the tape if one of its inputs requires a gradient.
   Returns the new node, or NULL if no input does, if recording is off, or after an error.
   The caller passes the data for `back` to stx__save. If the op has more results, the
   caller stores them in `more` and sets their needs_grad. */
static stx__node *stx__record(stx_ctx *x, stx_tensor *y, void (*back)(stx_ctx *, stx__node *),
                              stx_tensor *const *in, int count) {
    stx__node *n;
    int i, need = 0;
    /* this comes first, because recording is off when `uses` is set */
    if (x->tape.uses) stx__add_uses(x->tape.uses, in, count);
    if (!x->tape.recording) return NULL;
    for (i = 0; i < count; i++) need |= in[i] && in[i]->needs_grad;
    if (!need) return NULL;

    n = (stx__node *)stx__arena_alloc(x, &x->mem.step, sizeof *n);
    if (!n) return NULL;
    memset(n, 0, sizeof *n);
    for (i = 0; i < count; i++) n->in[i] = in[i];
    n->y = y;
    n->back = back;
    n->prev = x->tape.last;
    x->tape.last = n;
    y->needs_grad = 1;
    return n;
}

/* Copies `save`, the data for an op's backward function, to the op's node. Does nothing
   if node is NULL, that is, if the op was not recorded. Returns 1, or 0 after an
   error. */
static int stx__save(stx_ctx *x, stx__node *node, const void *save, size_t bytes) {
    if (!stx_ok(x)) return 0;
    if (!node) return 1;
    node->save = stx_step_host_bytes(x, bytes);
    if (!node->save) return 0;
    memcpy(node->save, save, bytes);
    return 1;
}

static stx__node *stx__record1(stx_ctx *x, stx_tensor *y, void (*back)(stx_ctx *, stx__node *),
                               stx_tensor *a) {
    return stx__record(x, y, back, &a, 1);
}

static stx__node *stx__record2(stx_ctx *x, stx_tensor *y, void (*back)(stx_ctx *, stx__node *),
                               stx_tensor *a, stx_tensor *b) {
    stx_tensor *in[2];
    in[0] = a;
    in[1] = b;
    return stx__record(x, y, back, in, 2);
}

/* Allocates a gradient of n elements without zeroing it. Reuses a free buffer of that
   size if there is one. If is_f32 is set, the gradient is f32 even if activations are
   stored as bf16. */
static stx_real *stx__grad_take(stx_ctx *x, size_t n, int is_f32) {
    stx__free_grad **link, *f;
    const size_t bytes = n * stx__element_size(x, stx__step_kind(is_f32));
    const int f32_among_bf16 = stx__stores_bf16(x) && is_f32;
    for (link = &x->tape.free_grads; *link; link = &(*link)->next) {
        f = *link;
        if (f->bytes != bytes || f->f32_among_bf16 != f32_among_bf16) continue;
        *link = f->next;
        f->next = x->tape.free_entries;
        x->tape.free_entries = f;
        return (stx_real *)f->p;
    }
    /* not stx__step_kind(is_f32): without bf16, all gradients share one arena */
    return stx__alloc_elements(x, stx__step_kind(f32_among_bf16), n);
}

/* Adds g, the buffer of a gradient of n elements, to the list of free buffers. */
static void stx__grad_give(stx_ctx *x, stx_real *g, size_t n, int is_f32) {
    stx__free_grad *f = x->tape.free_entries;
    if (!g) return;
    if (f)
        x->tape.free_entries = f->next;
    else
        f = (stx__free_grad *)stx__arena_alloc(x, &x->mem.step, sizeof *f);
    if (!f) return;
    f->p = g;
    f->bytes = n * stx__element_size(x, stx__step_kind(is_f32));
    f->f32_among_bf16 = stx__stores_bf16(x) && is_f32;
    f->next = x->tape.free_grads;
    x->tape.free_grads = f;
}

/* A position in each of the three arenas of a step, in the order of stx__step_arena.
   Index 0 is mem.step, which contains the tensor structs. */
typedef struct stx__mark {
    stx__chunk *cur[3];
    size_t chunk_used[3], used[3];
} stx__mark;

/* Called if t has no gradient yet. Returns 1, or sets an error and returns 0 if t was
   created before the current backward pass of stx_recompute. When this pass ends, it
   frees the gradients that it created, so t would lose its gradient. A gradient that t
   already had would remain. */
static int stx__check_outer_gradient(stx_ctx *x, const stx_tensor *t) {
    const stx__mark *mark = x->tape.recompute_mark;
    const stx__chunk *c;
    const char *p = (const char *)t;
    char s[96];
    int after_mark = 0;
    if (!mark || !mark->cur[0]) return 1; /* not in a backward pass of stx_recompute */
    for (c = x->mem.step.first; c; c = c->next) {
        const int at_mark = c == mark->cur[0];
        if (p >= c->base && p < c->base + c->size) {
            /* t is new if it is above the mark in the mark's chunk, or in a later
               chunk */
            if (after_mark || (at_mark && (size_t)(p - c->base) >= mark->chunk_used[0])) return 1;
            stx_fail(x, STX_ERR_ARG,
                     "stx_recompute: fn uses a tensor of shape %s that requires a gradient but is "
                     "not an input of stx_recompute: pass it in `in`, detach it with stx_detach, "
                     "or call fn without stx_recompute", stx__shape(t, s));
            return 0;
        }
        after_mark |= at_mark;
    }
    /* outside the step arena, only parameters and `input` of stx__recompute_back require
       gradients, and they already have them */
    return 1;
}

/* Returns the buffer of t's gradient. All gradient buffers on the tape are created here.
   On first use, `offer` becomes the buffer (if it is NULL, one is allocated), *fresh is
   set to 1, and the caller must overwrite the buffer. After that, *fresh is 0, and the
   caller must add to the buffer. If t is two inputs of one op, only the first request is
   fresh, so the kernel must write that gradient first. Returns NULL if t requires no
   gradient or the allocation failed. */
static stx_real *stx__grad_to(stx_ctx *x, stx_tensor *t, stx_real *offer, int *fresh) {
    *fresh = 0;
    if (!t || !t->needs_grad) return NULL;
    if (t->view_of) t->grad = stx__param_grad(x, t);
    if (t->op_removed) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_backward: the gradient of a tensor would be lost, because an earlier "
                 "backward pass of this step removed the tensor's op from the tape: call "
                 "stx_backward once per step, on the sum of the losses (stx_add), or detach the "
                 "tensor (stx_detach)");
        return NULL;
    }
    if (!t->grad) {
        if (!stx__check_outer_gradient(x, t)) return NULL;
        t->grad = offer ? offer : stx__grad_take(x, t->size, t->is_f32);
        *fresh = 1;
    }
    return t->grad;
}

static stx_real *stx__grad_fresh(stx_ctx *x, stx_tensor *t, int *fresh) {
    return stx__grad_to(x, t, NULL, fresh);
}

/* Returns the buffer of t's gradient for adding. A new buffer is zeroed. */
static stx_real *stx__grad(stx_ctx *x, stx_tensor *t) {
    int fresh;
    stx_real *g = stx__grad_fresh(x, t, &fresh);
    if (g && fresh) STX_RUN(x, stx_fill, (x, g, t->size, 0));
    return g;
}

/* Like stx__grad_fresh, but can return the buffer of dy, the gradient of n->y. n->y->grad
   is then NULL, because t owns the buffer: read n->y->grad before the call. t must not be
   NULL and has as many elements as n->y. The op's kernel must read dy[i] before it writes
   element i of t's gradient, and must not read dy[i] again. */
static stx_real *stx__grad_reuse(stx_ctx *x, stx__node *n, stx_tensor *t, int *fresh) {
    stx_real *g = stx__grad_to(x, t, t->is_f32 == n->y->is_f32 ? n->y->grad : NULL, fresh);
    if (g && g == n->y->grad) n->y->grad = NULL;
    return g;
}

/* Adds dy, the gradient of n->y, to the gradient of t. If `last` is set, dy is not
   needed afterwards. */
static void stx__grad_dy(stx_ctx *x, stx__node *n, stx_tensor *t, int last) {
    int fresh;
    stx_real *dy = n->y->grad;
    stx_real *d = last ? stx__grad_reuse(x, n, t, &fresh) : stx__grad_fresh(x, t, &fresh);
    if (d && d != dy) STX_RUN(x, stx_axpy, (x, d, dy, n->y->size, 1, !fresh));
}

/* An op recorded by stx_record. */
typedef struct stx__user_op {
    stx_back_fn back;
    void *save;
} stx__user_op;

static void stx__user_back(stx_ctx *x, stx__node *n) {
    const stx__user_op *op = (const stx__user_op *)n->save;
    op->back(x, n->y, n->in, op->save);
}

static int stx__check_record(stx_ctx *x, const char *op, stx_tensor *const *in, int count,
                             stx_back_fn back) {
    if (count < 0 || count > STX_MAX_INS) {
        stx_fail(x, STX_ERR_ARG, "%s: count: expected 0 to %d inputs, got %d", op,
                 (int)STX_MAX_INS, count);
    } else if (count && !in) {
        stx_fail(x, STX_ERR_ARG, "%s: in: expected an array of length %d, got NULL", op, count);
    } else if (!back) {
        stx_fail(x, STX_ERR_ARG, "%s: back: expected a function, got NULL", op);
    }
    return stx_ok(x);
}

/* Implements stx_record and stx_record_results. `op` is the name in error texts. */
static int stx__record_results(stx_ctx *x, const char *op, stx_tensor *const *y, int results,
                               stx_tensor *const *in, int count, stx_back_fn back, void *save) {
    stx__node *n;
    stx__user_op *user;
    int i;
    if (!stx_ok(x) || !y) return 0;
    if (results < 1 || results > 1 + STX_MAX_MORE) {
        stx_fail(x, STX_ERR_ARG, "%s: results: expected 1 to %d tensors, got %d", op,
                 1 + STX_MAX_MORE, results);
        return 0;
    }
    for (i = 0; i < results; i++)
        if (!y[i]) return 0;
    if (!stx__check_record(x, op, in, count, back)) return 0;

    n = stx__record(x, y[0], stx__user_back, in, count);
    if (!n) return 0;
    for (i = 1; i < results; i++) {
        n->more[i - 1] = y[i];
        y[i]->needs_grad = 1;
    }
    user = (stx__user_op *)stx_step_host_bytes(x, sizeof *user);
    if (!user) return 0;
    user->back = back;
    user->save = save;
    n->save = user;
    return 1;
}

STX_DEF int stx_record(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, int count,
                       stx_back_fn back, void *save) {
    return stx__record_results(x, "stx_record", &y, 1, in, count, back, save);
}

STX_DEF int stx_record_results(stx_ctx *x, stx_tensor *const *y, int results, stx_tensor *const *in,
                               int count, stx_back_fn back, void *save) {
    return stx__record_results(x, "stx_record_results", y, results, in, count, back, save);
}

STX_DEF stx_real *stx_grad(stx_ctx *x, stx_tensor *t, int *fresh) {
    if (fresh) *fresh = 0;
    if (!stx_ok(x)) return NULL;
    return fresh ? stx__grad_fresh(x, t, fresh) : stx__grad(x, t);
}

STX_DEF uint64_t stx_random_stream(stx_ctx *x) {
    return x ? stx__stream(x) : 0;
}

/* Called when the op that computed t has been removed from the tape. Recycles the
   buffer of t's gradient, which only the op's backward function reads. */
static void stx__output_done(stx_ctx *x, stx_tensor *t) {
    t->op_removed = 1;
    /* stx__token_loss_back can store the gradient in the logits themselves. These are not
       recycled: the list contains only buffers from stx__grad_take, never the elements of
       a tensor. */
    if (t->grad != t->data) stx__grad_give(x, t->grad, t->size, t->is_f32);
    t->grad = NULL;
}

static int stx__is_output(const stx__node *n, const stx_tensor *t) {
    int i, found = n->y == t;
    for (i = 0; i < STX_MAX_MORE; i++) found |= n->more[i] == t;
    return found;
}

/* On a GPU, defers sums over rows that are added to parameter gradients, from a call
   with by = 1 to a call with by = -1. The partial sums of a deferred sum stay in a
   buffer on the GPU until one kernel completes many deferred sums. Gradients of other
   tensors are not deferred, because the rest of the backward pass reads them or
   recycles their buffers. Calls can nest, as in stx_recompute. The outermost call with
   by = -1, or a call with by = 0, completes all deferred sums. */
static void stx__defer_sums(stx_ctx *x, int by) {
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) stx_cuda_defer_sums(x, by);
#else
    (void)x;
    (void)by;
#endif
}

/* Returns 1 if a gradient of the list is not 0. */
static int stx__any_grad(const stx_params *p) {
    size_t i, e;
    if (p->grads_state == STX__GRADS_ZERO) return 0;
    if (p->ctx->desc.dry) return p->grads_state == STX__GRADS_ADDED;
    for (i = 0; i < p->count; i++)
        for (e = 0; p->tensor[i]->needs_grad && e < p->tensor[i]->size; e++)
            if (!(p->tensor[i]->grad[e] == 0)) return 1;
    return 0;
}

/* Before a backward pass on a CPU: moves the sums of earlier passes to p->earlier, so
   that this pass starts from 0. The order of additions is then that of ranks that compute
   one pass each: first all within a pass, then those of the passes. p->earlier has the
   gradients of the list, each padded (stx__grad_padded), like the block p->grads. */
static void stx__put_grads_aside(stx_params *p) {
    stx_ctx *x = p->ctx;
    const int any = stx__any_grad(p);
    stx_real *to;
    size_t i, total = 0;
    p->grads_state = STX__GRADS_ADDED;
    if (!any) return;
    for (i = 0; i < p->count; i++)
        if (p->tensor[i]->needs_grad) total += stx__grad_padded(p->tensor[i]);
    if (!p->earlier || p->earlier_size < total) {
        p->earlier = stx__grads_alloc(x, p->grads_arena, total);
        p->earlier_size = total;
    }
    to = p->earlier;
    for (i = 0; to && i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        if (!t->needs_grad) continue;
        STX_RUN(x, stx_copy2d, (x, to, t->size, t->grad, t->size, 1, t->size, 0));
        STX_RUN(x, stx_fill, (x, t->grad, t->size, 0));
        to += stx__grad_padded(t);
    }
    p->aside = to != NULL;
}

/* Adds the sums of earlier passes. */
static void stx__add_grads_aside(stx_params *p) {
    stx_ctx *x = p->ctx;
    const stx_real *from = p->earlier;
    size_t i;
    for (i = 0; p->aside && i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        if (!t->needs_grad) continue;
        STX_RUN(x, stx_axpy, (x, t->grad, from, t->size, 1, 1));
        from += stx__grad_padded(t);
    }
    p->aside = 0;
}

/* Runs and removes all nodes, newest first. Nodes whose outputs have no gradient are
   removed without being run. In a group, sends gradients as they become complete;
   `left` is the number of nodes that remain on the tape. */
static void stx__run_backward(stx_ctx *x) {
    const int recording = x->tape.recording, outer = !x->tape.recompute_mark;
    const int sending = x->group.sending && outer;
    stx_params *p;
    size_t left = sending ? x->group.ops->backward_begin(x) : 0;
    x->tape.recording = 0;
    for (p = x->lists; p && outer && !stx__on_gpu(x); p = p->next) stx__put_grads_aside(p);
    stx__defer_sums(x, 1);

    while (x->tape.last && !x->error.code) {
        stx__node *n = x->tape.last;
        int i, has_grad = n->y->grad != NULL;
        if (sending) x->group.ops->backward_step(x, left--);
        x->tape.last = n->prev;
        for (i = 0; i < STX_MAX_MORE; i++) has_grad |= n->more[i] && n->more[i]->grad;
        if (has_grad) n->back(x, n);
        stx__output_done(x, n->y);
        for (i = 0; i < STX_MAX_MORE; i++)
            if (n->more[i]) stx__output_done(x, n->more[i]);
    }

    stx__defer_sums(x, -1);
    if (sending && !x->error.code) x->group.ops->backward_step(x, 0);
    for (p = x->lists; p && outer; p = p->next)
        if (p != x->group.sending) stx__add_grads_aside(p);
    if (sending) x->group.sending = NULL;
    x->tape.recording = recording;
}

/* Adds dy, which is in host memory, to the gradient of y, the tensor from which
   stx__run_backward starts. If dy is NULL, adds ones. Returns 1, or 0 after an
   error. */
static int stx__seed_gradient(stx_ctx *x, stx_tensor *y, const stx_real *dy) {
    stx_real *g, *seed;
    stx__node *n;
    for (n = x->tape.last; n && !stx__is_output(n, y); n = n->prev) {
    }
    if (!n && !y->is_leaf) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_backward: an earlier backward pass of this step removed the tensor's op from "
                 "the tape: call stx_backward once per step, on the sum of the losses (stx_add), "
                 "or begin a new step");
        return 0;
    }
    if (!stx__grads_at_rest(x, "stx_backward")) return 0;

    /* y may already have a gradient, which stx_upload to g would overwrite */
    g = stx__grad(x, y);
    seed = g ? stx__grad_take(x, y->size, y->is_f32) : NULL;
    if (!seed) return 0;
    if (dy)
        stx_upload(x, seed, dy, y->size);
    else
        STX_RUN(x, stx_fill, (x, seed, y->size, 1));
    STX_RUN(x, stx_axpy, (x, g, seed, y->size, 1, 1));
    stx__grad_give(x, seed, y->size, y->is_f32);
    return 1;
}

STX_DEF void stx_backward_from(stx_ctx *x, stx_tensor *y, const stx_real *dy) {
    STX__FP_SCOPE;
    if (!x || x->error.code || !y) return;
    if (!y->needs_grad) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_backward: the tensor does not depend on a parameter or variable, or "
                 "nothing was recorded: call stx_begin(x, STX_TRAIN) before the ops");
        return;
    }
    if (stx__seed_gradient(x, y, dy)) stx__run_backward(x);
}

STX_DEF void stx_backward_many(stx_ctx *x, stx_tensor *const *y, const stx_real *const *dy,
                               int count) {
    STX__FP_SCOPE;
    int i, any = 0;
    if (!x || x->error.code) return;
    for (i = 0; y && i < count; i++) {
        if (!y[i] || !y[i]->needs_grad) continue;
        any = 1;
        if (!stx__seed_gradient(x, y[i], dy ? dy[i] : NULL)) return;
    }
    if (!any) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_backward_many: no tensor in y depends on a parameter or variable, or "
                 "nothing was recorded: call stx_begin(x, STX_TRAIN) before the ops");
        return;
    }
    stx__run_backward(x);
}

STX_DEF void stx_backward(stx_ctx *x, stx_tensor *loss) {
    if (!x || x->error.code || !loss) return;
    if (loss->size != 1) {
        char s[96];
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_backward: loss: expected one element, got shape %s: reduce it with stx_mean, "
                 "or use stx_backward_from", stx__shape(loss, s));
        return;
    }
    stx_backward_from(x, loss, NULL);
}


// >>recomputation

/* stx_recompute keeps only the results of fn, and computes the rest again in the backward
   pass. A mark is a position in the step arenas; releasing it frees all memory allocated
   above it.

       forward     1. allocate the node, and save the index of the next random stream
                   2. set the mark and run fn with recording off
                   3. move the results down to the mark, which frees fn's other memory
                   4. put the node on the tape

       backward    1. create the gradients of the inputs, which must outlive this pass
                   2. set a new mark; start an inner tape and new lists of free gradients
                   3. run fn again with the same random streams and recording on
                   4. add the gradients of the kept results to those of the new results
                   5. run the backward pass over the inner tape
                   6. restore the outer tape and its lists, and release the mark

   Step 6 also frees the gradients created in steps 3 to 5. Therefore,
   stx__check_outer_gradient (>>tape) rejects tensors from outside fn that have no
   gradient before step 2. Parameter gradients are in another arena and remain.

   Calls can nest. With recording off, the inner call only calls its function. In step 3,
   it records a node on the inner tape. */

static stx__arena *stx__step_arena(stx_ctx *x, int i) {
    if (i == 0) return &x->mem.step;
    return i == 1 ? &x->mem.dev_step : &x->mem.dev_bytes;
}

static stx__mark stx__step_mark(stx_ctx *x) {
    stx__mark m;
    int i;
    for (i = 0; i < 3; i++) {
        stx__arena *a = stx__step_arena(x, i);
        m.cur[i] = a->cur;
        m.chunk_used[i] = a->cur ? a->cur->used : 0;
        m.used[i] = a->used;
    }
    return m;
}

/* Rewinds the step arenas to the mark. The memory above the mark stays readable until
   it is reallocated. */
static void stx__step_release(stx_ctx *x, stx__mark m) {
    int i;
    for (i = 0; i < 3; i++) {
        stx__arena *a = stx__step_arena(x, i);
        a->cur = m.cur[i] ? m.cur[i] : a->first;
        if (a->cur) a->cur->used = m.chunk_used[i];
        a->used = m.used[i];
    }
}

/* The data that the backward pass needs to run the function again. */
typedef struct stx__recompute_save {
    stx_recompute_fn fn;
    void *user;
    uint64_t op; /* value of x->rng.op before the first run */
    int count, more;
    stx__uses uses;
} stx__recompute_save;

/* Adds the gradient of an output of the first run to the gradient of the corresponding
   output of the second run. */
static void stx__recompute_seed(stx_ctx *x, const stx_tensor *first, stx_tensor *again) {
    stx_real *g;
    if (!first || !first->grad || !again || !again->needs_grad || x->error.code) return;
    g = stx__grad(x, again);
    if (g) STX_RUN(x, stx_axpy, (x, g, first->grad, again->size, 1, 1));
}

/* Runs the function again and records it on a separate, inner tape. Then runs the
   backward pass over this tape and frees its memory. */
static void stx__recompute_back(stx_ctx *x, stx__node *n) {
    stx__recompute_save *s = (stx__recompute_save *)n->save;
    /* Copies of the structs of n->in, which share their elements and gradients. The inner
       tape ends at them, and the inner pass cannot change the structs of the outer tape.
       They can be on the C stack, because no inner node is used after this function. */
    stx_tensor input[STX_MAX_RECOMPUTE_INS], *in[STX_MAX_RECOMPUTE_INS];
    stx_tensor *y, *more[STX_MAX_MORE] = {NULL};
    stx__node *outer_tape = x->tape.last;
    const stx__mark *outer_mark = x->tape.recompute_mark;
    stx__free_grad *free_grads, *free_entries;
    const uint64_t op = x->rng.op;
    stx__mark mark;
    int i;
    for (i = 0; i < s->count; i++) {
        input[i] = *n->in[i];
        input[i].grad = stx__grad(x, n->in[i]);
        in[i] = &input[i];
    }

    mark = stx__step_mark(x);
    x->tape.recompute_mark = &mark;
    /* use separate lists of free gradients, because memory allocated in this pass is
       released below */
    free_grads = x->tape.free_grads;
    free_entries = x->tape.free_entries;
    x->tape.free_grads = x->tape.free_entries = NULL;
    x->tape.last = NULL;
    x->rng.op = s->op;
    x->tape.recording = 1;
    y = s->fn(x, s->user, in, more);

    stx__recompute_seed(x, n->y, y);
    for (i = 0; i < s->more; i++) stx__recompute_seed(x, n->more[i], more[i]);
    if (x->tape.last && !x->error.code) stx__run_backward(x);

    x->tape.recording = 0;
    x->rng.op = op;
    x->tape.last = outer_tape;
    x->tape.recompute_mark = outer_mark;
    x->tape.free_grads = free_grads;
    x->tape.free_entries = free_entries;
    stx__step_release(x, mark);
}

/* Allocates memory for the elements of t in the step arena. */
static stx_real *stx__alloc_like(stx_ctx *x, const stx_tensor *t) {
    return stx__alloc_elements(x, stx__step_kind(t->is_f32), t->size);
}

/* Copies the result t into a new tensor that belongs to the outer tape. */
static stx_tensor *stx__keep_result(stx_ctx *x, const stx_tensor *t, int needs_grad) {
    stx_tensor *out = (stx_tensor *)stx__arena_alloc(x, &x->mem.step, sizeof *out);
    if (!out) return NULL;
    *out = *t;
    out->grad = NULL;
    out->is_param = out->is_leaf = out->op_removed = 0;
    out->view_of = NULL;
    out->padding = 0;
    out->data = stx__alloc_like(x, t);
    if (!out->data) return NULL;
    stx__move(x, out->data, t->data, t->size, t->is_f32);
    out->needs_grad = needs_grad;
    return out;
}

/* Moves the results result[0..count) down to the mark and frees all other memory that fn
   allocated above the mark. The results can be anywhere in that memory.

   A single result on a CPU is moved directly, because memmove allows the ranges to
   overlap. Its new struct, at the mark, cannot overwrite its elements. A tensor's struct
   is allocated before its elements, so these begin at least one struct above the mark. In
   all other cases, moving one result could overwrite another, and copies on a GPU must
   not overlap, so all results are first copied to memory above the memory that fn
   allocated. If fn returned an input or a view, it may have allocated less memory than
   the results need, and their destinations would then overlap the copies. To prevent
   this, the first loop allocates, but does not use, as much memory as the destinations
   need. */
static int stx__keep_results(stx_ctx *x, stx__mark mark, stx_tensor **result, int count,
                             int needs_grad) {
    stx_tensor copy[1 + STX_MAX_MORE];
    const int copies = count > 1 || stx__on_gpu(x);
    int i;
    for (i = 0; i < count; i++)
        if (result[i]) copy[i] = *result[i];

    for (i = 0; copies && i < count; i++) {
        if (!result[i]) continue;
        if (!stx__arena_alloc(x, &x->mem.step, sizeof copy[i])) return 0;
        if (!stx__alloc_like(x, &copy[i])) return 0;
    }
    for (i = 0; copies && i < count; i++) {
        if (!result[i]) continue;
        copy[i].data = stx__alloc_like(x, &copy[i]);
        if (!copy[i].data) return 0;
        stx__move(x, copy[i].data, result[i]->data, copy[i].size, copy[i].is_f32);
    }

    stx__step_release(x, mark);
    for (i = 0; i < count; i++) {
        if (!result[i]) continue;
        result[i] = stx__keep_result(x, &copy[i], needs_grad);
        if (!result[i]) return 0;
    }
    return 1;
}

static int stx__check_recompute(stx_ctx *x, stx_recompute_fn fn, stx_tensor **in, int count,
                                stx_tensor **out, int more) {
    if (count < 0 || count > STX_MAX_RECOMPUTE_INS) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: count: expected 0 to %d inputs, got %d",
                 (int)STX_MAX_RECOMPUTE_INS, count);
    } else if (more < 0 || more > STX_MAX_MORE) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: more: expected 0 to %d results, got %d",
                 (int)STX_MAX_MORE, more);
    } else if (!fn) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: fn: expected a function, got NULL");
    } else if (!in && count) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: in: expected an array of length %d, got NULL",
                 count);
    } else if (!out && more) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: out: expected an array of length %d, got NULL",
                 more);
    }
    return stx_ok(x);
}

STX_DEF stx_tensor *stx_recompute(stx_ctx *x, stx_recompute_fn fn, void *user, stx_tensor **in,
                                  int count, stx_tensor **out, int more) {
    STX__FP_SCOPE;
    stx_tensor *result[1 + STX_MAX_MORE] = {NULL}, *none[STX_MAX_MORE] = {NULL};
    stx__recompute_save *s;
    stx__node *n;
    stx__mark mark;
    int i;
    for (i = 0; out && i < more; i++) out[i] = NULL;
    if (!stx_ok(x) || !stx__check_recompute(x, fn, in, count, out, more)) return NULL;
    for (i = 0; i < count; i++)
        if (!in[i]) return NULL;
    if (!x->tape.recording) return fn(x, user, in, more ? out : none);

    n = (stx__node *)stx__arena_alloc(x, &x->mem.step, sizeof *n);
    s = (stx__recompute_save *)stx_step_host_bytes(x, sizeof *s);
    if (!n || !s) return NULL;
    s->fn = fn;
    s->user = user;
    s->op = x->rng.op;
    s->count = count;
    s->more = more;
    s->uses.any = 0;
    s->uses.lo = s->uses.hi = NULL;

    /* the first run, which records nothing */
    x->tape.uses = &s->uses;
    mark = stx__step_mark(x);
    x->tape.recording = 0;
    result[0] = fn(x, user, in, result + 1);
    x->tape.recording = 1;
    x->tape.uses = NULL;
    if (!result[0]) {
        stx_fail(x, STX_ERR_ARG, "stx_recompute: fn must return a tensor, but it returned NULL");
        return NULL;
    }
    for (i = 0; i <= more; i++) /* fn can return an input */
        if (result[i]) s->uses.any |= result[i]->needs_grad;
    if (!stx__keep_results(x, mark, result, 1 + more, s->uses.any)) return NULL;
    for (i = 0; i < more; i++) out[i] = result[1 + i];
    if (!s->uses.any) return result[0];

    memset(n, 0, sizeof *n);
    for (i = 0; i < count; i++) n->in[i] = in[i];
    for (i = 0; i < more; i++) n->more[i] = out[i];
    n->save = s;
    n->y = result[0];
    n->back = stx__recompute_back;
    n->prev = x->tape.last;
    x->tape.last = n;
    return result[0];
}
