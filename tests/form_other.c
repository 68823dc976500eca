/* form_other.c - the second unit of form.sh's programs: uses the header, or
   (FORM_ONLY_IMPLEMENT) is nothing but the implementation, or has a private one of its
   own (SEQTX_STATIC with SEQTX_IMPLEMENTATION on the command line). */
#ifdef FORM_ONLY_IMPLEMENT
  #define SEQTX_IMPLEMENTATION
  #include FORM_HEADER
#else
  #include FORM_HEADER
#endif

#ifdef __cplusplus
extern "C"
#endif
    int
    form_other(void);

int form_other(void) {
    stx_ctx *x = stx_create(0);
    int bad = !stx_ok(x);
    (void)FORM_CALL(0);
    stx_destroy(x);
    return bad;
}
