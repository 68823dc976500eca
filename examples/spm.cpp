/* spm.cpp - SentencePiece for seqtx_text.h: wraps a C++ library in the six C functions
   that seqtx_text.h declares under >>sentencepiece

       make SENTENCEPIECE=1            needs libsentencepiece and its headers (Debian:
                                       libsentencepiece-dev)
       c++ -O2 -c spm.cpp              link with -lsentencepiece_train -lsentencepiece
                                       -lstdc++; compile the rest with
                                       -DSEQTX_SENTENCEPIECE

   No warranty implied; MIT or public domain, your choice (see the end of seqtx.h). */
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <cstdio>
#include <exception>
#include <string>
#include <unordered_map>
#include <vector>

#include "../seqtx.h"
#include "../seqtx_text.h"

namespace {

struct spm {
    sentencepiece::SentencePieceProcessor p;
    std::vector<int> ids;       /* the pieces of the last line */
    std::vector<int32_t> out;   /* the same, as stx_spm_encode returns them */
};

/* Writes an error text to err, which has n bytes. Returns 0. */
int fail(char *err, size_t n, const std::string &why) {
    std::snprintf(err, n, "%s", why.c_str());
    return 0;
}

}  // namespace

extern "C" {

void *stx_spm_open(const void *model, size_t n, char *err, size_t err_size) try {
    spm *s = new spm;
    const absl::string_view bytes(static_cast<const char *>(model), n);
    const auto status = s->p.LoadFromSerializedProto(bytes);
    if (status.ok() && s->p.GetPieceSize() > 0) return s;
    fail(err, err_size, status.ok() ? "it has no pieces" : status.ToString());
    delete s;
    return nullptr;
} catch (const std::exception &e) {
    fail(err, err_size, e.what());
    return nullptr;
}

void stx_spm_close(void *s) {
    delete static_cast<spm *>(s);
}

size_t stx_spm_size(const void *s, int32_t *eos, int32_t *unk) {
    const auto &p = static_cast<const spm *>(s)->p;
    *eos = p.eos_id();
    *unk = p.unk_id();
    return static_cast<size_t>(p.GetPieceSize());
}

const char *stx_spm_piece(const void *s, size_t id, size_t *len, int *type) {
    const auto &p = static_cast<const spm *>(s)->p;
    const int i = static_cast<int>(id);
    const std::string &piece = p.IdToPiece(i);
    *type = STX_PIECE_TEXT;
    if (p.IsByte(i)) *type = STX_PIECE_BYTE;
    if (p.IsUnknown(i)) *type = STX_PIECE_UNKNOWN;
    if (p.IsControl(i)) *type = STX_PIECE_CONTROL;
    *len = piece.size();
    return piece.data();
}

int stx_spm_encode(void *s, const char *line, size_t n, const int32_t **ids, size_t *count,
                   char *err, size_t err_size) try {
    spm *m = static_cast<spm *>(s);
    const auto status = m->p.Encode(absl::string_view(line, n), &m->ids);
    if (!status.ok()) return fail(err, err_size, status.ToString());
    m->out.assign(m->ids.begin(), m->ids.end());
    *ids = m->out.data();
    *count = m->out.size();
    return 1;
} catch (const std::exception &e) {
    return fail(err, err_size, e.what());
}

int stx_spm_train(const char *const *names, const char *const *values, size_t n, char *err,
                  size_t err_size) try {
    std::unordered_map<std::string, std::string> options;
    for (size_t i = 0; i < n; i++) options[names[i]] = values[i];
    const auto status = sentencepiece::SentencePieceTrainer::Train(options);
    return status.ok() ? 1 : fail(err, err_size, status.ToString());
} catch (const std::exception &e) {
    return fail(err, err_size, e.what());
}

}  // extern "C"
