/* The C interface of the ops: plain structs, device pointers and a stream in, errors as text.
 *
 * It is what other languages and training frameworks bind to. liblogitd.so has it; C and C++ may
 * include this file.
 *
 *   logitd_context* context;
 *   if (logitd_open("cuda", 0, 0, 0, &context) != LOGITD_OK) puts(logitd_error());
 *   logitd_softmax_topk op = {.struct_size = sizeof(op), .input = logits, .k = 8, ...};
 *   logitd_run_softmax_topk(context, &call, &op);
 *
 * Each op is a struct and a function of that name. The fields mean what the arguments of the op in
 * kernels/ mean, with the accuracy and the bits that its header promises: the header is named at
 * each struct. A call enqueues and returns ("cuda"), or computes and returns ("cpu"). It allocates
 * no memory of the device, waits for nothing, and may be captured in a CUDA graph after one call of
 * the same shape. Calls of one context from several threads take turns.
 *
 * Memory. All pointers of an op are in the memory of the context's device, except those to structs
 * of this file. On CUDA, inputs are read in aligned blocks of 16 bytes: up to 15 bytes beside a
 * tensor are read too, but not used, and must be readable. Allocations of CUDA and of torch are
 * whole blocks. Outputs that are null are not wanted, where the struct does not say otherwise. No
 * output overlaps another or an input, where the op's header does not allow it.
 *
 * Rows. A parameter of rows is one value for all, or an array with one for each. Values for all are
 * checked, and refused with text. Arrays are in device memory and are checked there: a row with a
 * value that is not allowed gets the code LOGITD_ROW_REFUSED, NaN for every number of it and -1 for
 * every integer, and affects no other row. `position` of its status is the parameter's number below.
 *
 * Versions. A function never changes, and a struct only grows at its end: `struct_size` says which
 * fields the caller knows; the others are as if zero, and zero always means "as before".
 */
#ifndef LOGITD_KERNELS_C_API_H_
#define LOGITD_KERNELS_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LOGITD_ABI_VERSION = 1 };

/* Codes that functions return. */
enum {
  LOGITD_OK = 0,
  LOGITD_INVALID_ARGUMENT = 1,
  LOGITD_UNAVAILABLE = 2,        /* no such backend or device, or a library it needs is missing */
  LOGITD_RESOURCE_EXHAUSTED = 3, /* the workspace is too small */
  LOGITD_INTERNAL = 4            /* the device has failed */
};

/* The version of this interface: LOGITD_ABI_VERSION of the library. */
int32_t logitd_abi_version(void);
/* The text of this thread's last error, "<field>: got <value>, allowed <range>"; "" before any. It
 * lives until the thread's next call. */
const char* logitd_error(void);

typedef struct logitd_context logitd_context;

/* Opens a device. backend: "cpu" or "cuda". device: CUDA's ordinal; 0 on the CPU. threads: of the
 * CPU, 0 = all that the process may use. scratch_bytes: memory that ops may use for intermediate
 * results, 0 = 256 MiB, at least 96 MiB; not used on the CPU. An op's bits may depend on it. */
int32_t logitd_open(const char* backend, int32_t device, int32_t threads, uint64_t scratch_bytes,
                    logitd_context** context);
/* No call of the context runs any more. Null is allowed. */
void logitd_close(logitd_context* context);
/* Bytes of workspace that a call with so many rows needs; 0 on the CPU. */
uint64_t logitd_workspace_bytes(const logitd_context* context, int64_t rows);

/* The place of a call. All zero on the CPU. */
typedef struct logitd_call {
  void* stream;             /* cudaStream_t */
  void* workspace;          /* device memory, aligned to 256 bytes; used by one stream at a time */
  uint64_t workspace_bytes; /* at least logitd_workspace_bytes */
} logitd_call;

/* Prepares new workspace; later calls leave it prepared. */
int32_t logitd_prepare_workspace(logitd_context* context, const logitd_call* call);

enum { LOGITD_F32 = 0, LOGITD_F16 = 1, LOGITD_BF16 = 2 };

/* A matrix. */
typedef struct logitd_tensor {
  void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride; /* elements, at least cols */
  int32_t dtype;
  int32_t reserved; /* 0, as are all fields of this name */
} logitd_tensor;

/* kernels/head.h. Rows of the weight, of hidden states and of their gradients are aligned to 16
 * bytes. */
typedef struct logitd_head {
  logitd_tensor weight; /* [vocab, hidden] */
  const float* bias;    /* [vocab], or null */
  const float* norm;    /* [hidden], or null */
  float norm_epsilon;
  float scale; /* 1: none */
  float softcap;
  int32_t reserved;
} logitd_head;

/* A parameter of rows: `each` [rows] in device memory, or, where that is null, `all`. */
typedef struct logitd_number {
  const float* each;
  float all;
  int32_t reserved;
} logitd_number;
typedef struct logitd_integer {
  const int64_t* each;
  int64_t all;
} logitd_integer;

/* Lists of tokens: row r has values[offsets[r], offsets[r + 1]). Null: no row has any. Offsets that
 * fall, or leave [0, size], are refused as parameters are. */
typedef struct logitd_lists {
  const int32_t* values;
  const int64_t* offsets; /* [rows + 1] */
  int64_t size;           /* of values */
} logitd_lists;

/* Added to the logit of a token. */
typedef struct logitd_bias {
  int32_t id;
  float value; /* not NaN; -inf bans the token */
} logitd_bias;
/* Lists of bias, laid out like logitd_lists; each token at most once in a row. */
typedef struct logitd_biases {
  const logitd_bias* values;
  const int64_t* offsets; /* [rows + 1] */
  int64_t size;           /* of values */
} logitd_biases;

enum {
  LOGITD_ROW_OK = 0,
  LOGITD_ROW_NAN = 1,    /* a logit is NaN, at `position` */
  LOGITD_ROW_EMPTY = 2,  /* every logit is -inf */
  LOGITD_ROW_REFUSED = 4 /* a parameter of the row is not allowed */
};
typedef struct logitd_row_status {
  int32_t code;
  int32_t position;
} logitd_row_status;

/* ---- softmax_topk (kernels/softmax_topk.h) */

typedef struct logitd_softmax_topk {
  uint64_t struct_size;
  logitd_tensor input;       /* logits [rows, vocab]; with a head, hidden states [rows, hidden] */
  const logitd_head* head;   /* or null */
  logitd_number temperature; /* parameter 1 */
  int64_t k;                 /* 1..vocab */
  int32_t* indices;          /* [rows, k] */
  float* probs;              /* [rows, k] */
  float* logsumexp;          /* [rows] */
  logitd_row_status* status; /* [rows] */
} logitd_softmax_topk;
int32_t logitd_run_softmax_topk(logitd_context* context, const logitd_call* call,
                                const logitd_softmax_topk* op);

/* ---- sample (kernels/sample.h, kernels/sampling_rules.h) */

enum { LOGITD_LOGPROBS_RAW = 0, LOGITD_LOGPROBS_PROCESSED = 1, LOGITD_LOGPROBS_TEMPERED = 2 };

typedef struct logitd_sample {
  uint64_t struct_size;
  logitd_tensor input;     /* as in logitd_softmax_topk */
  const logitd_head* head; /* or null */
  /* Parameters 1 to 14, in this order. */
  logitd_integer seed;
  logitd_integer position;
  logitd_number temperature;
  logitd_integer top_k;
  logitd_number top_p;
  logitd_number top_n_sigma;
  logitd_number min_p;
  logitd_number typical_p;
  logitd_number xtc_threshold;
  logitd_number xtc_probability;
  logitd_number repetition_penalty;
  logitd_number presence_penalty;
  logitd_number frequency_penalty;
  logitd_integer prompt_tokens;
  logitd_lists history;     /* parameter 15: token ids */
  logitd_biases bias;       /* parameter 16 */
  const uint32_t* mask;     /* [rows, (vocab + 31) / 32], bit i % 32 of word i / 32; or null */
  const int32_t* extra_ids; /* [rows, extra_count], parameter 17: token ids */
  int32_t extra_count;      /* 0..1024 */
  int32_t top_logprobs;     /* 0..1024 */
  int32_t logprob_mode;
  int32_t want_support; /* 0..1024 */
  int32_t draws;        /* 0..1024 */
  int32_t want_rank;    /* 0 or 1 */
  int32_t want_entropy; /* 0 or 1 */
  int32_t watermark_width;
  uint64_t watermark_key;
  int32_t* tokens;           /* [rows] */
  float* logprobs;           /* [rows] */
  int32_t* ranks;            /* [rows] */
  float* logsumexp;          /* [rows] */
  int32_t* top_ids;          /* [rows, top_logprobs]; not null where that is not 0 */
  float* top_values;         /* [rows, top_logprobs], log-probabilities; likewise */
  float* extra_logprobs;     /* [rows, extra_count]; likewise */
  int32_t* support_size;     /* [rows] */
  int32_t* support_ids;      /* [rows, want_support]; likewise */
  float* support_logprobs;   /* [rows, want_support]; likewise */
  float* entropies;          /* [rows] */
  float* raw_entropies;      /* [rows] */
  int32_t* draw_tokens;      /* [rows, draws]; likewise */
  float* draw_logprobs;      /* [rows, draws]; likewise */
  logitd_row_status* status; /* [rows] */
} logitd_sample;
int32_t logitd_run_sample(logitd_context* context, const logitd_call* call,
                          const logitd_sample* op);

/* ---- cross_entropy (kernels/cross_entropy.h, kernels/linear.h) */

enum { LOGITD_SMOOTHING_TORCH = 0, LOGITD_SMOOTHING_MEGATRON = 1 };
/* The weight of a row's loss in `total`: none; 1; or 1 / the rows that are not ignored, NaN where
 * there are none. */
enum { LOGITD_REDUCE_NONE = 0, LOGITD_REDUCE_SUM = 1, LOGITD_REDUCE_MEAN = 2 };

/* The losses of rows, shared by the three ops below. */
typedef struct logitd_loss_rows {
  const int64_t* targets;        /* [rows], parameter 1: tokens, or ignore_index */
  int64_t ignore_index;          /* no token */
  logitd_number temperature;     /* parameter 2 */
  logitd_number label_smoothing; /* parameter 3 */
  logitd_number z_loss;          /* parameter 4 */
  float softcap;                 /* of logits; 0 with a head, which has its own */
  int32_t smoothing;
  /* A shard of a vocabulary: the input's tokens are [first_token, first_token + its tokens) of
   * `vocab`. 0, 0: the whole. Only the backward takes it. */
  int64_t first_token;
  int64_t vocab;
  /* Not 0: ignored rows are left out, whatever their input holds, and have 0 for every number. It
   * is how many rows are not ignored, or more: ops on hidden states may compute only so many. */
  int64_t counted_rows;
} logitd_loss_rows;

typedef struct logitd_cross_entropy {
  uint64_t struct_size;
  logitd_tensor input;     /* as in logitd_softmax_topk */
  const logitd_head* head; /* or null */
  logitd_loss_rows rows;
  int32_t top_logprobs; /* 0..128 */
  int32_t reduction;
  float* loss;               /* [rows] */
  float* logsumexp;          /* [rows] */
  float* target_logprob;     /* [rows] */
  int32_t* rank;             /* [rows] */
  float* entropy;            /* [rows] */
  int32_t* top_ids;          /* [rows, top_logprobs]; not null where that is not 0 */
  float* top_values;         /* [rows, top_logprobs], log-probabilities; likewise */
  logitd_row_status* status; /* [rows] */
  float* total;              /* [1]; not null where there is a reduction */
} logitd_cross_entropy;
int32_t logitd_run_cross_entropy(logitd_context* context, const logitd_call* call,
                                 const logitd_cross_entropy* op);

/* Gradients of sum upstream * loss. */
typedef struct logitd_cross_entropy_backward {
  uint64_t struct_size;
  logitd_tensor input;     /* as in the forward */
  const logitd_head* head; /* without a norm; or null */
  logitd_loss_rows rows;
  const float* logsumexp; /* [rows], as the forward wrote it */
  const float* upstream;  /* [rows] */
  /* Without a head: of the logits, their dtype, not null; may be the input itself. With one: of the
   * hidden states, the weight's dtype or f32; data null: not wanted, which no shard may ask for. */
  logitd_tensor d_input;
  logitd_tensor d_weight; /* the weight's dtype or f32; data null: not wanted */
  float* d_bias;          /* [vocab], or null */
} logitd_cross_entropy_backward;
int32_t logitd_run_cross_entropy_backward(logitd_context* context, const logitd_call* call,
                                          const logitd_cross_entropy_backward* op);

/* Losses and gradients in one call, which reads or makes the logits once where it can. */
typedef struct logitd_cross_entropy_training {
  uint64_t struct_size;
  logitd_tensor input;     /* as in the backward */
  const logitd_head* head; /* without a norm; or null */
  logitd_loss_rows rows;
  const float* upstream;     /* [rows]; null where there is a reduction: then it is of `total` */
  float* loss;               /* [rows] */
  float* logsumexp;          /* [rows] */
  float* target_logprob;     /* [rows] */
  logitd_row_status* status; /* [rows] */
  logitd_tensor d_input;     /* as in the backward; not null */
  logitd_tensor d_weight;    /* likewise; may be null */
  float* d_bias;             /* [vocab], or null */
  int32_t reduction;
  int32_t reserved;
  float* total; /* as in the forward */
} logitd_cross_entropy_training;
int32_t logitd_run_cross_entropy_training(logitd_context* context, const logitd_call* call,
                                          const logitd_cross_entropy_training* op);

/* ---- divergence (kernels/divergence_training.h) */

enum { LOGITD_FORWARD_KL = 0, LOGITD_REVERSE_KL = 1, LOGITD_JENSEN_SHANNON = 2 };

/* Losses of hidden states beside a reference's, both under heads, and gradients. */
typedef struct logitd_divergence_training {
  uint64_t struct_size;
  logitd_tensor hidden;           /* [rows, hidden] */
  const logitd_head* head;        /* without a norm */
  logitd_tensor reference_hidden; /* [rows, its own hidden size] */
  const logitd_head* reference_head;
  logitd_number temperature;           /* parameter 1 */
  logitd_number reference_temperature; /* parameter 2 */
  int32_t kind;
  float beta;                /* of LOGITD_JENSEN_SHANNON */
  const float* upstream;     /* [rows] */
  float* loss;               /* [rows] */
  logitd_row_status* status; /* [rows] */
  logitd_tensor d_hidden;    /* the weight's dtype or f32; data null: not wanted */
  logitd_tensor d_weight;    /* likewise */
  float* d_bias;             /* [vocab], or null */
} logitd_divergence_training;
int32_t logitd_run_divergence_training(logitd_context* context, const logitd_call* call,
                                       const logitd_divergence_training* op);

/* ---- attention_softmax (kernels/attention_softmax.h) */

enum { LOGITD_MASK_NONE = 0, LOGITD_MASK_BOOL = 1, LOGITD_MASK_ADDITIVE = 2 };

typedef struct logitd_attention_shape {
  int64_t batch, heads, queries, keys;
  int64_t window_left;  /* -1: unbounded */
  int64_t window_right; /* -1: unbounded; 0: causal */
  float scale;
  int32_t reserved;
} logitd_attention_shape;

/* Element (b, h, i, j) is at data[b * batch_stride + h * head_stride + i * query_stride + j]. */
typedef struct logitd_mask {
  const void* data;
  int32_t kind;
  int32_t dtype; /* of LOGITD_MASK_ADDITIVE */
  int64_t batch_stride;
  int64_t head_stride;
  int64_t query_stride;
} logitd_mask;

typedef struct logitd_attention_softmax {
  uint64_t struct_size;
  logitd_attention_shape shape;
  logitd_tensor scores; /* [batch * heads * queries, keys] */
  logitd_mask mask;
  const float* sinks;        /* [heads], or null */
  logitd_tensor probs;       /* the scores' dtype or f32; may be the scores themselves */
  float* logsumexp;          /* [rows] */
  logitd_row_status* status; /* [rows], not null; position: a key */
} logitd_attention_softmax;
int32_t logitd_run_attention_softmax(logitd_context* context, const logitd_call* call,
                                     const logitd_attention_softmax* op);

typedef struct logitd_attention_softmax_backward {
  uint64_t struct_size;
  logitd_attention_shape shape;
  logitd_tensor probs;       /* [batch * heads * queries, keys] */
  logitd_tensor d_probs;     /* as probs */
  logitd_tensor d_scores;    /* the probs' dtype; any where probs are f32; may be either of both */
  const float* sinks;        /* [heads], or null: then the next two are null */
  const float* logsumexp;    /* [rows] */
  double* d_sinks;           /* [heads] */
  logitd_row_status* status; /* [rows], not null */
} logitd_attention_softmax_backward;
int32_t logitd_run_attention_softmax_backward(logitd_context* context, const logitd_call* call,
                                              const logitd_attention_softmax_backward* op);

#ifdef __cplusplus
}
#endif

#endif /* LOGITD_KERNELS_C_API_H_ */
