/* nccl.h - the part of NCCL that seqtx_cuda.cu uses, for the host implementation of CUDA:
   non-blocking communicators between processes of one machine, through shared memory.
   Names, values and signatures are NCCL's. Uses that NCCL leaves undefined are detected
   (README.md). The bodies are in cuda_host.cpp. */
#ifndef CUDA_HOST_NCCL_H
#define CUDA_HOST_NCCL_H
#include "cuda_runtime.h"
#include <limits.h>

#define NCCL_VERSION(X, Y, Z) ((X)*10000 + (Y)*100 + (Z))
#define NCCL_VERSION_CODE     NCCL_VERSION(2, 14, 0)
typedef struct ncclComm *ncclComm_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

#define CUDA_HOST__NCCL(X) \
  X(ncclSuccess, 0, "no error") \
  X(ncclUnhandledCudaError, 1, "unhandled cuda error") \
  X(ncclSystemError, 2, "unhandled system error") \
  X(ncclInternalError, 3, "internal error") \
  X(ncclInvalidArgument, 4, "invalid argument") \
  X(ncclInvalidUsage, 5, "invalid usage") \
  X(ncclRemoteError, 6, "remote process exited or there was a network error") \
  X(ncclInProgress, 7, "NCCL operation in progress")
#define CUDA_HOST__NCCL_ENUM(name, value, text) name = value,

typedef enum { CUDA_HOST__NCCL(CUDA_HOST__NCCL_ENUM) ncclNumResults = 8 } ncclResult_t;

typedef enum { ncclInt8 = 0, ncclUint8 = 1, ncclFloat = 7, ncclDouble = 8 } ncclDataType_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN

typedef struct {
    size_t size;
    unsigned int magic, version;
    int blocking;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER \
  { sizeof(ncclConfig_t), 0xcafebeefu, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT }

extern "C" {
ncclResult_t ncclGetVersion(int *version);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t s);
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t s);
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t s);
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t s);
ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t s);
}
#endif
