/* ddp_file.h -- files of tensors of libddp; included by ddp.h, whose conventions hold. The safetensors format
 * (huggingface.co/docs/safetensors): a JSON header and the tensors' bytes, row-major. */
#ifndef DDP_FILE_H
#define DDP_FILE_H

#ifndef DDP_CDEF
#include "ddp.h"
#ifdef __cplusplus
extern "C" {
#endif
#endif

typedef struct ddp_file ddp_file;
/* Writes tensors and texts to `path`. What stood there stays until the new file is whole and on the disk: it is written
 * under another name in the same folder, synced and renamed. What killed writers of the same path left behind is removed.
 *   names    [n] UTF-8, each once; no "__metadata__"
 *   tensors  [n] of any strides
 *   keys, texts  [n_texts] UTF-8, each key once: the file's "__metadata__"
 * DDP_EIO with the system's reason: then the old file is as it was. DDP_EINVAL for names and texts. Any thread. */
DDP_API int ddp_file_write(const char *path, int n, const char *const *names, ddp_tensor *const *tensors, int n_texts,
                           const char *const *keys, const char *const *texts);
/* A file that others write, and that takes its place when it is whole, as above.
 *   out  [OUT] freed with ddp_file_draft_free, which removes the file unless it was committed; one thread at a time */
typedef struct ddp_file_draft ddp_file_draft;
DDP_API int ddp_file_draft_new(const char *path, ddp_file_draft **out);
/* The name to write under, in the folder of `path`; valid until the draft is freed. NULL for NULL. */
DDP_API const char *ddp_file_draft_name(const ddp_file_draft *d);
DDP_API int ddp_file_draft_commit(ddp_file_draft *d);
DDP_API void ddp_file_draft_free(ddp_file_draft *d);
/* Opens a file: maps it and checks its whole header. DDP_EIO, saying where it is damaged, unless every byte of it belongs to
 * one tensor of a dtype that there is here.
 *   out  [OUT] freed with ddp_file_free; one thread at a time */
DDP_API int ddp_file_open(const char *path, ddp_file **out);
/* One of its tensors; name is valid until ddp_file_free. */
typedef struct ddp_file_entry {
    const char *name;
    int dtype, ndim;
    int64_t size[DDP_MAX_DIM];
} ddp_file_entry;
/* Accessors: set no error. Tensors are numbered from 0 in the order of their names. */
DDP_API int ddp_file_len(const ddp_file *f);                            /* how many tensors */
DDP_API int ddp_file_find(const ddp_file *f, const char *name);         /* the number of one; -1: none */
DDP_API int ddp_file_at(const ddp_file *f, int i, ddp_file_entry *out); /* DDP_EINVAL past the last */
DDP_API int ddp_file_texts(const ddp_file *f);                          /* how many texts */
DDP_API const char *ddp_file_text_key(const ddp_file *f, int i);        /* NULL past the last */
DDP_API const char *ddp_file_text(const ddp_file *f, const char *key);  /* NULL: none */
DDP_API uint64_t ddp_file_digest(const ddp_file *f);                    /* of length and header */
/* Tensor i over the mapping, which it keeps: a new reference, or NULL. Writes to it do not reach the file. */
DDP_API ddp_tensor *ddp_file_tensor(ddp_file *f, int i);
/* Copies tensor i into t, of the same shape and any float dtype or layout, and gives the mapping's memory back. DDP_ESHAPE. */
DDP_API int ddp_file_read(ddp_file *f, int i, ddp_tensor *t);
/* The memory behind tensor i goes back until it is read again; what was written to a ddp_file_tensor of it is lost. */
DDP_API void ddp_file_forget(ddp_file *f, int i);
/* NULL is allowed. Tensors that ddp_file_tensor made stay. */
DDP_API void ddp_file_free(ddp_file *f);

#ifndef DDP_CDEF
#ifdef __cplusplus
}
#endif
#endif
#endif
