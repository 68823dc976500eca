/* exec.h - what the execution functions of all classes share: values of lanes, loops over
   lanes, and the opcode that a decoder takes apart. */
#ifndef PTX_EXEC_H
#define PTX_EXEC_H
#include "machine.h"
#include <math.h>
#include <string.h>
#include <type_traits>

namespace ptx {


// >>opcodes

/* An opcode and its modifiers. Decoders take the modifiers that they know; an opcode with
   modifiers left is not implemented. */
struct opcode {
    std::string name;
    std::vector<std::string> modifiers;

    bool take(const char *modifier);
    type take_type();                   /* the first type, or NO_TYPE */
    ptx::rounding take_rounding();
    ptx::space take_space();            /* GENERIC if there is none */
};

/* Describes an instruction. Returns false if this form is not implemented. */
typedef bool decoder(opcode &, form &);

decoder decode_integer, decode_bits, decode_logic, decode_shift;
decoder decode_float, decode_approximate, decode_convert;
decoder decode_compare, decode_select, decode_move;
decoder decode_load, decode_store, decode_atomic, decode_address, decode_copy, decode_fence;
decoder decode_control, decode_barrier;
decoder decode_shuffle, decode_vote, decode_match, decode_reduce;
decoder decode_mma, decode_ldmatrix;

/* add, sub, mul, .. exist for integers and for floats. */
decoder decode_arithmetic;


// >>values

__extension__ typedef __int128 int128;
__extension__ typedef unsigned __int128 uint128;

/* 16-bit floats. Arithmetic happens in float or double. */
struct half {
    uint16_t bits;
};

struct bfloat {
    uint16_t bits;
};

float to_float(half h);
half to_half(double d, rounding r);
bfloat to_bfloat(double d, rounding r);

inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline uint32_t float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

inline float to_float(bfloat b) { return bits_to_float((uint32_t)b.bits << 16); }

/* The word that holds a value of type T in a row: 32 bits unless T has 64. Smaller values
   are zero-extended. */
template <class T>
using word_of = typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type;

template <class T> inline T from_word(word_of<T> w) {
    T value;
    if constexpr (sizeof(T) == sizeof w) {
        memcpy(&value, &w, sizeof w);
    } else if constexpr (std::is_integral<T>::value) {
        value = (T)w;
    } else {
        uint16_t low = (uint16_t)w;
        memcpy(&value, &low, sizeof low);
    }
    return value;
}

template <class T> inline word_of<T> to_word(T value) {
    word_of<T> w;
    if constexpr (sizeof(T) == sizeof w) {
        memcpy(&w, &value, sizeof w);
    } else if constexpr (std::is_integral<T>::value) {
        w = (word_of<T>)(typename std::make_unsigned<T>::type)value;
    } else {
        uint16_t low;
        memcpy(&low, &value, sizeof low);
        w = low;
    }
    return w;
}

template <class T> inline word_of<T> *row(machine &m, operand o) {
    if constexpr (sizeof(T) == 8) return row64(m, o);
    else return row32(m, o);
}


// >>loops over lanes

#if defined(__clang__)
  #define LANES_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
  #define LANES_INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Rows of different registers do not overlap, and a row that is both source and
   destination is read before it is written, lane by lane. */
template <auto F, class D, class... A>
inline void for_rows(uint32_t active, word_of<D> *d, const word_of<A> *...a) {
    if (active == ALL_LANES) {
        LANES_INDEPENDENT
        for (int l = 0; l < LANES; l++) d[l] = to_word<D>(F(from_word<A>(a[l])...));
        return;
    }
    for (int l : lanes{active}) d[l] = to_word<D>(F(from_word<A>(a[l])...));
}

template <auto F, class D, class... A, size_t... N>
inline void map_operands(D (*)(A...), machine &m, const instruction &i, uint32_t active,
                         std::index_sequence<N...>) {
    for_rows<F, D, A...>(active, row<D>(m, i.o[0]), row<A>(m, i.o[N + 1])...);
}

template <class D, class... A>
constexpr std::index_sequence_for<A...> operand_numbers(D (*)(A...)) { return {}; }

/* The execution function that applies F to each active lane: operand 0 = F(operand 1,
   operand 2, ..). */
template <auto F> void map(machine &m, const instruction &i, uint32_t active) {
    map_operands<F>(F, m, i, active, operand_numbers(F));
}

/* map<Op<T>::of> for the C++ type of a PTX type, or NULL. */
template <template <class> class Op> execute *for_integers(type t) {
    switch (t) {
    case U16: case B16: return map<Op<uint16_t>::of>;
    case U32: case B32: return map<Op<uint32_t>::of>;
    case U64: case B64: return map<Op<uint64_t>::of>;
    case S16: return map<Op<int16_t>::of>;
    case S32: return map<Op<int32_t>::of>;
    case S64: return map<Op<int64_t>::of>;
    default: return nullptr;
    }
}

/* Chooses by the size of a type. */
template <class T> T by_size(type t, T bytes2, T bytes4, T bytes8) {
    if (type_size(t) == 8) return bytes8;
    return type_size(t) == 4 ? bytes4 : bytes2;
}

/* The operand strings of n sources of type t and a destination of the same type. */
const char *same_operands(type t, int sources);

/* What a barrier does besides waiting; the variant of its form. */
enum barrier_variant : uint8_t {
    BARRIER_SYNC, BARRIER_AND, BARRIER_OR, BARRIER_POPC
};

/* Whether ptx_approximate is on. */
bool approximate();
/* A result that deviates from the exact one such that, after it is rounded to float, the
   error is at most `units` in its last place. The deviation depends on the input only. */
double deviated(double exact, uint32_t input, double units);

} // namespace ptx
#endif
