/*
 * instep: fused optimizer steps over whole gradient buckets, overlapped with backward. docs/c.md has the examples.
 *
 * Written by cbindgen from capi/src; `UPDATE=1 cargo test -p instep-capi header` writes it again.
 *
 * Status: every function that can fail returns one, and results go to the places at the end of the arguments. A place is
 * written only if the call succeeds.
 *
 * Handles: instep_layout, instep_bucket_step, instep_norm and instep_stepper. A handle is no address. One that is null, was
 * freed or is of another kind is refused. Two threads may not use one handle at the same time: the second one gets
 * INSTEP_BUSY. All other calls may run at the same time.
 *
 * Structs: one that begins with `size` may grow in later versions. Set it to sizeof the struct and all else to zeros, which
 * stand for defaults. A library takes structs of older programs, and those of newer ones if they use nothing new. Structs and
 * what they point to are read during the call and stay the caller's, if they do not say otherwise.
 *
 * Processes: after the first handle a forked child gets INSTEP_FORKED from every call that can fail. dlclose leaves the
 * library in memory, because its threads may still run.
 */

#ifndef INSTEP_H
#define INSTEP_H

#include <stddef.h>
#include <stdint.h>

// A number of the trainer's in a checkpoint: a real number.
#define INSTEP_NUMBER 0

// A number of the trainer's in a checkpoint: a whole number, such as an epoch or a seed.
#define INSTEP_INTEGER 1

// The checkpoint has no number of this name.
#define INSTEP_ABSENT 2

// Element type: float, IEEE 754 binary32. In a field for a type, 0 stands for the default that the field names.
#define INSTEP_F32 1

// Element type: bfloat16.
#define INSTEP_BF16 2

// Element type: IEEE 754 binary16.
#define INSTEP_F16 3

// 16-bit parameters have no master weight. The default.
#define INSTEP_MASTER_NONE 0

// An f32 weight beside each 16-bit parameter.
#define INSTEP_MASTER_F32 1

// The lower 16 bits of an f32 whose upper half is the bf16 parameter.
#define INSTEP_MASTER_REMAINDER16 2

// The next 8 bits of it.
#define INSTEP_MASTER_REMAINDER8 3

// A group is clipped together with all groups that have this, by the stepper's clip. The default.
#define INSTEP_GROUP_CLIP_TOGETHER 0

// A group is clipped alone, by the norm of its own gradients, exactly. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_ALONE 1

// A group is not clipped. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_NONE 2

// Optimizer states are f32. The default.
#define INSTEP_STATES_F32 0

// Optimizer states are bf16.
#define INSTEP_STATES_BF16 1

// Optimizer states are codes of 8 bits, with an f32 scale per 256 elements.
#define INSTEP_STATES_8BIT 2

// Steps a bucket as soon as it is reduced. The default.
#define INSTEP_MODE_EAGER 0

// Steps once the last bucket is reduced and the norm is known.
#define INSTEP_MODE_NORMED 1

// Steps after the last sum, one bucket after the other.
#define INSTEP_MODE_SEQUENTIAL 2

// Stepped gradients stay as they are: sums over the ranks. The default.
#define INSTEP_GRADIENTS_KEEP 0

// The step zeroes the gradients it has read.
#define INSTEP_GRADIENTS_ZERO 1

// The memory of stepped gradients goes back to the system. Only in a stepper that owns its memory, on the CPU.
#define INSTEP_GRADIENTS_RELEASE 2

// The step leaves in each gradient the value that was stepped: the mean over ranks, without the loss scale and clipped.
#define INSTEP_GRADIENTS_AVERAGE 3

// INSTEP_UNUSED_SKIP if the stepper owns its buckets and their sums, else INSTEP_UNUSED_REFUSE.
#define INSTEP_UNUSED_DEFAULT 0

// A parameter whose gradient no rank wrote stays as it is. Refused on borrowed memory, which cannot count ranks.
#define INSTEP_UNUSED_SKIP 1

// It is stepped with a gradient of zeros, which are written to the gradient's memory.
#define INSTEP_UNUSED_STEP_ZERO 2

// instep_stepper_finish refuses the pass, and names it.
#define INSTEP_UNUSED_REFUSE 3

// All ranks have as many batches. The default.
#define INSTEP_INPUTS_EVEN 0

// Ranks may join without data; steps divide by world_size.
#define INSTEP_INPUTS_BY_WORLD_SIZE 1

// Ranks may join without data; steps divide by the number of ranks that had data.
#define INSTEP_INPUTS_BY_CONTRIBUTORS 2

// The optimizer steps the parameter. The default.
#define INSTEP_ACTION_STEP 0

// Its gradient is averaged over the ranks, for another optimizer.
#define INSTEP_ACTION_AVERAGE 1

// Its gradient stays a sum, and it stays as it is.
#define INSTEP_ACTION_LEAVE 2

// Nothing is clipped. The default.
#define INSTEP_CLIP_NONE 0

// Clips by the norm of all gradients, exactly. Refused in INSTEP_MODE_EAGER.
#define INSTEP_CLIP_GLOBAL 1

// Clips by the norm of the pass before.
#define INSTEP_CLIP_PREVIOUS 2

// Clips each bucket by its own norm.
#define INSTEP_CLIP_PER_BUCKET 3

// A tensor of a parameter: the parameter itself. Copied as f32, it is its master weight, if it has one.
#define INSTEP_PARAM 0

// Its gradient: after a pass the sum over the ranks, loss scale included.
#define INSTEP_GRAD 1

// A state of its optimizer, whose name goes with it.
#define INSTEP_STATE 2

// Its copy in another type.
#define INSTEP_COPY 3

// Its moving average.
#define INSTEP_EMA 4

// The address is for reading.
#define INSTEP_READ 0

// The address is for writing and reading.
#define INSTEP_WRITE 1

// A collective call: every rank is to hold the sum over all ranks, the same bits on each.
#define INSTEP_ALL_REDUCE 0

// A collective call: every rank is to hold what rank 0 has.
#define INSTEP_BROADCAST 1

// States that an optimizer keeps per element, at most.
#define INSTEP_STATES_AT_MOST 4

// The step of one bucket, with its step counts and hyperparameters; tensors come with each call.
//
// The caller owns it until instep_bucket_step_free. It may be used on any thread, on one at a time: a second one
// gets INSTEP_BUSY. Different bucket steps may be used at the same time.
typedef struct instep_bucket_step instep_bucket_step;

// The names, shapes and groups of a model's parameters.
//
// The caller owns it until instep_layout_free. Steps and steppers keep what they need of it, so it may be freed
// once they are created. Handles are used on one thread at a time: a second one gets INSTEP_BUSY.
typedef struct instep_layout instep_layout;

// The norm over the gradients of any number of buckets, which clips their steps or leaves them out.
//
// The caller owns it until instep_norm_free. It may be used on any thread, on one at a time: a second one gets
// INSTEP_BUSY.
typedef struct instep_norm instep_norm;

// A rank's training: parameters, gradients and states, and the passes that step them.
//
// The caller owns it until instep_stepper_free. It may be used on any thread, on one at a time: a second one gets
// INSTEP_BUSY. On a GPU whose compute_stream is the per-thread default stream (2) it stays on the thread that created it.
typedef struct instep_stepper instep_stepper;

// The outcome of a call. INSTEP_OK is 0, everything else is a failure, which instep_last_error describes. Codes keep their
// numbers in later versions, which may add more.
typedef int32_t instep_status;

// Names a tensor of a stepper.
typedef struct {
  // INSTEP_PARAM, INSTEP_GRAD, INSTEP_STATE, INSTEP_COPY or INSTEP_EMA.
  uint32_t kind;
  // The parameter's number.
  uint32_t param;
  // The state's name, as instep_optimizer_state_name says it; null for any other kind.
  const char *state;
} instep_tensor_id;

// A flat bucket of gradients in the caller's memory.
typedef struct {
  // The first element.
  void *address;
  // The number of elements, gaps included.
  size_t elements;
  // The parameters whose gradients lie in it.
  const uint32_t *params;
  // Where each of them starts, in elements.
  const size_t *offsets;
  // The number of them.
  size_t param_count;
} instep_bucket;

// The caller's tensors. Addresses are of the stepper's device; precisions and layout say the types, of which a
// bucket holds one.
//
// Until instep_stepper_free has returned, the stepper reads and writes them. Between instep_stepper_address, asked to write,
// and the hand-over, the caller may write a gradient; between instep_stepper_address and the hand-over, it may read a
// parameter. At all other times it touches neither.
typedef struct {
  // sizeof(instep_memory).
  size_t size;
  // The address of each parameter, by its number.
  void *const *params;
  // As many as the layout has; in instep_stepper_rebind also 0: they stay where they are.
  size_t param_count;
  // All buckets, which are numbered in this order. Every parameter is in one of them.
  const instep_bucket *buckets;
  // The number of them; in instep_stepper_rebind also 0: they stay where they are.
  size_t bucket_count;
} instep_memory;

// One hyperparameter.
typedef struct {
  // Its name as in torch.optim: "lr", "weight_decay". A pair is two: betas are "beta1" and "beta2".
  const char *name;
  // Its value; flags are 0 or 1.
  double value;
} instep_hyper;

// An optimizer and its hyperparameters. It is read during the call that it is passed to, and stays the caller's.
typedef struct {
  // sizeof(instep_optimizer).
  size_t size;
  // Its name as in torch.optim or in its paper, in upper or lower case: "AdamW", "sgd", "lamb".
  const char *name;
  // Hyperparameters; those that are left out have the defaults of torch.optim.
  const instep_hyper *hypers;
  // The number of them.
  size_t hyper_count;
} instep_optimizer;

// Element types of the tensors. Arithmetic is f32 for all of them.
typedef struct {
  // sizeof(instep_precision).
  size_t size;
  // Type of parameters; 0: INSTEP_F32.
  uint32_t param;
  // Type of gradients, in which they are summed too; 0: INSTEP_F32.
  uint32_t grad;
  // The bits that 16-bit parameters lack: INSTEP_MASTER_NONE, _F32, _REMAINDER16 or _REMAINDER8.
  uint32_t master;
  // Storage of optimizer states: INSTEP_STATES_F32, _BF16 or _8BIT.
  uint32_t states;
  // 1: round stochastically where bits are lost. 0: to the nearest.
  uint32_t is_stochastic;
  // Zero; anything else is refused.
  uint32_t reserved;
  // Seed of stochastic rounding, equal on all ranks.
  uint64_t seed;
} instep_precision;

// What one group of parameters has of its own.
typedef struct {
  // The group's name.
  const char *name;
  // Its optimizer; null: that of all others.
  const instep_optimizer *optimizer;
  // Its element types; null: those of all others. A bucket step has one precision, so it takes null alone.
  const instep_precision *precision;
  // INSTEP_GROUP_CLIP_TOGETHER, _ALONE or _NONE. A bucket step is clipped by its norm, so it takes 0 alone.
  uint32_t clip;
  // Zero; anything else is refused.
  uint32_t reserved;
  // The largest norm of a group that is clipped alone; else 0.
  double max_norm;
} instep_group;

// A GPU, and how it is used.
typedef struct {
  // sizeof(instep_cuda).
  size_t size;
  // The device's number.
  uint32_t ordinal;
  // Priority of a stepper's steps beside the kernels on compute_stream; lower runs sooner.
  int32_t optim_priority;
  // A stepper's trainer runs on this stream (cudaStream_t or CUstream); null: the legacy default stream. Bucket steps and
  // norms take a stream in each call, and ignore this one.
  void *compute_stream;
  // Thread blocks of a step at most; 0: about 224 KiB to move for each, and no fewer than the GPU holds.
  uint32_t max_blocks;
  // Zero; anything else is refused.
  uint32_t reserved;
} instep_cuda;

// Options of a bucket step. Zeros stand for defaults, but in layout and optimizer. Everything is read during the call.
typedef struct {
  // sizeof(instep_bucket_step_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // Steps the parameters of all groups that groups does not name.
  const instep_optimizer *optimizer;
  // Groups with optimizers of their own.
  const instep_group *groups;
  // The number of them.
  size_t group_count;
  // The parameters of the bucket; null: all of the layout, one after the other, without gaps.
  const uint32_t *params;
  // Where each of them starts in the bucket, in elements.
  const size_t *offsets;
  // The number of them.
  size_t param_count;
  // The bucket's elements, gaps included. Read if there are params.
  size_t elements;
  // Element types; null: f32.
  const instep_precision *precision;
  // The type of a copy of each stepped parameter; 0: none.
  uint32_t copy;
  // INSTEP_GRADIENTS_KEEP, _ZERO or _AVERAGE.
  uint32_t gradients;
  // Decay rate of moving averages; 0: none are kept.
  double ema_decay;
  // Threads of a step on the CPU, the caller's included, 1024 at most; 0: the caller's alone. Steps with equal numbers share their
  // threads, which live as long as the process.
  uint32_t threads;
  // Zero; anything else is refused.
  uint32_t reserved;
  // The GPU; null: the CPU.
  const instep_cuda *cuda;
  // For each of params, the elements of a row of the larger parameter that it is a shard of, cut between rows; 0: none. Null:
  // all are full. Stochastic rounding and blocks of 8-bit states are those of the full parameter then. With 8-bit states each
  // row of states, scales, masters, copies and averages starts at a multiple of 256 elements.
  const uint64_t *row_elements;
  // For each of params that has rows, the number of its first element among those of all full parameters. Read with row_elements.
  const uint64_t *first_elements;
} instep_bucket_step_options;

// Where one kind of tensor lies: one run with the bucket's offsets, or one run per parameter. All zeros: there is none.
typedef struct {
  // The first element of the run; null if each parameter has its own.
  void *address;
  // The first element of each parameter, in the order of the bucket; null if there is one run. On a GPU, only parameters
  // and gradients may lie apart. A gradient whose address in this list is null is none: the call passes over its parameter,
  // whose tensors and step count stay as they are, and norms leave it out.
  void *const *addresses;
  // The run's elements, or the number of addresses. It is compared with the bucket's.
  size_t count;
} instep_tensor;

// The tensors of one step.
//
// The memory is the caller's. It is read and written until the call returns, on a GPU until the stream has passed the step,
// and nothing else may touch it meanwhile. Addresses are aligned to an element, and no two tensors overlap.
typedef struct {
  // sizeof(instep_tensors).
  size_t size;
  // Parameters, of the precision's type.
  instep_tensor params;
  // Summed gradients, of the precision's type.
  instep_tensor grads;
  // Master weights or remainders, if the precision has them. Before the first step an f32 master holds its parameter's
  // value, and remainders are zeros.
  instep_tensor master;
  // The copy in another type, if the options ask for it. Only written.
  instep_tensor copy;
  // Moving averages, if the options ask for them: f32.
  instep_tensor ema;
  // The optimizer's states, in the order of instep_optimizer_state_name. Before the first step they are zeros.
  instep_tensor states[INSTEP_STATES_AT_MOST];
  // The scales of 8-bit states: a float per 256 elements of the bucket.
  instep_tensor scales[INSTEP_STATES_AT_MOST];
} instep_tensors;

// The factors in the gradients: each is multiplied by clip / (world_size * loss_scale). Zeros stand for 1.
typedef struct {
  // sizeof(instep_scaling).
  size_t size;
  // The gradients are sums over so many ranks.
  uint32_t world_size;
  // Zero; anything else is refused.
  uint32_t reserved;
  // The factor in the loss.
  double loss_scale;
  // A clip coefficient that the caller has computed, from 0 to 1.
  double clip;
  // Null, or the loss scale in the memory of the step's device, in the place of loss_scale (GradScaler's _scale). It is
  // read when the step runs.
  const float *grad_scale;
  // Null, or a flag in the memory of the step's device: other than 0, the step changes nothing (GradScaler's found_inf).
  const float *found_inf;
} instep_scaling;

// A number of the trainer's, which a checkpoint holds beside the stepper.
typedef struct {
  // Its name: "epoch". Names that begin with "param.", "state." or "ema." are the library's.
  const char *name;
  // INSTEP_NUMBER or INSTEP_INTEGER; after a load INSTEP_ABSENT if the file does not have it.
  uint32_t kind;
  // Zero.
  uint32_t reserved;
  // The value of an INSTEP_NUMBER.
  double number;
  // The value of an INSTEP_INTEGER.
  uint64_t integer;
} instep_scalar;

// One parameter.
typedef struct {
  // sizeof(instep_param).
  size_t size;
  // Its name, which no other parameter has; checkpoints have it.
  const char *name;
  // Its dimensions; their product is the number of elements. None: a scalar, of one element.
  const size_t *shape;
  // The number of dimensions.
  size_t dimensions;
  // Its group, whose optimizer steps it. Null: "default".
  const char *group;
  // How often it is handed over in a pass: 0 and 1 stand for once, more for a shared parameter.
  uint32_t uses;
  // INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE or INSTEP_ACTION_LEAVE.
  uint32_t action;
  // 1: each rank's own, never summed. 0: shared by all ranks.
  uint32_t is_local;
  // Type of the parameter and of its gradient; 0: those of its group's precision.
  uint32_t dtype;
} instep_param;

// What follows from a norm.
typedef struct {
  // sizeof(instep_decision), set by the caller.
  size_t size;
  // The norm of all averaged gradients; infinite or NaN if one of them is.
  double norm;
  // The factor that clips them; 1 if nothing is clipped or all steps are left out.
  double clip;
  // 1 if no gradient is infinite or NaN.
  uint32_t is_finite;
  // 1 if steps after this decision change nothing.
  uint32_t is_skipped;
} instep_decision;

// What the device has decided about a pass.
typedef struct {
  // sizeof(instep_pass_status), set by the caller.
  size_t size;
  // The pass, counted from 1, abandoned ones too; 0: none has ended.
  uint64_t pass;
  // Passes abandoned so far.
  uint64_t abandoned;
  // 1: it changed nothing, because a gradient was infinite or NaN.
  uint32_t is_skipped;
  // 1: norm is known.
  uint32_t has_norm;
  // The norm of all averaged gradients.
  double norm;
  // The factor that clipped them; 1 without clipping.
  double clip;
  // The factor in the loss that was divided out.
  double loss_scale;
  // The first bucket with an infinite or NaN gradient, or -1.
  int64_t first_nonfinite_bucket;
} instep_pass_status;

// A loss scale that follows the gradients, as torch.amp.GradScaler's. Zeros stand for its defaults.
typedef struct {
  // sizeof(instep_loss_scaler).
  size_t size;
  // The first pass's scale; 65536.
  double initial_scale;
  // The factor after growth_interval passes without a skip; 2.
  double growth_factor;
  // The factor after a skipped pass; 0.5.
  double backoff_factor;
  // Passes without a skip until it grows; 2000.
  uint32_t growth_interval;
  // Zero; anything else is refused.
  uint32_t reserved;
} instep_loss_scaler;

// One collective call of one rank.
typedef struct {
  // sizeof(instep_call) of the library, which may be larger than the caller's.
  size_t size;
  // INSTEP_ALL_REDUCE or INSTEP_BROADCAST.
  uint32_t kind;
  // Element type: INSTEP_F32, INSTEP_BF16 or INSTEP_F16.
  uint32_t dtype;
  // The source, `bytes` long.
  const void *src;
  // The destination, `bytes` long; may be the source.
  void *dst;
  // Length of both.
  uint64_t bytes;
  // The pass, counted from the stepper's first.
  uint64_t pass;
  // The bucket, or -1 if there is none.
  int64_t bucket;
  // How long the call may wait for other ranks, in milliseconds.
  uint64_t deadline_ms;
  // On a GPU, the stream to enqueue on; null on the CPU.
  void *stream;
  // 32 bytes that are equal on all ranks. Ranks whose keys differ are out of step: fail, or they hang later.
  uint8_t key[32];
} instep_call;

// A collective of the caller's, one rank of it. The struct is copied; `data` is passed to each function.
//
// A function may call nothing of this library but instep_version, instep_status_name and instep_last_error; any other call
// in it is INSTEP_BUSY. No exception may leave it: instep::caught of this header makes a status of one. One that leaves ends
// the process.
typedef struct {
  // sizeof(instep_collective).
  size_t size;
  // The caller's. Used on any thread until instep_stepper_free has returned. If the stepper is not created, not at all.
  void *data;
  // Takes part in one collective call, and returns INSTEP_OK, or anything else, which ends the stepper. On the CPU it is
  // called on a thread of the library's, one call at a time, may block until all ranks are through, and the result is in
  // `dst` when it returns. On a GPU it is called on the thread that calls the stepper, and only enqueues. Every rank makes
  // the same calls in the same order. Not null.
  instep_status (*enqueue)(void *data, const instep_call *call);
  // Ends the group: every rank's current and later calls are to fail. `cause` is valid during the call, which must not
  // block. Called on any thread, also beside `enqueue`. May be null for one rank alone.
  void (*abort)(void *data, const char *cause);
  // Says that the stepper no longer uses `data`. Called once, by instep_stepper_free. May be null.
  void (*release)(void *data);
  // 1: sums bf16 too.
  uint32_t sums_bf16;
  // 1: sums f16 too.
  uint32_t sums_f16;
  // 1: reaches the memory of GPUs. 0: the CPU's.
  uint32_t reaches_gpus;
  // Zero; anything else is refused.
  uint32_t reserved;
} instep_collective;

// Options of a stepper. Zeros stand for defaults, but in layout and optimizer. Everything is read during the call; memory,
// the collective's data and the stream stay in use until the stepper is freed.
typedef struct {
  // sizeof(instep_stepper_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // Steps the parameters of all groups that groups does not name.
  const instep_optimizer *optimizer;
  // Groups with optimizers of their own.
  const instep_group *groups;
  // The number of them.
  size_t group_count;
  // Element types; null: f32.
  const instep_precision *precision;
  // INSTEP_MODE_EAGER, INSTEP_MODE_NORMED or INSTEP_MODE_SEQUENTIAL: when steps run. The result has the same bits in all of them.
  uint32_t mode;
  // INSTEP_GRADIENTS_KEEP, _ZERO, _AVERAGE or _RELEASE.
  uint32_t gradients;
  // INSTEP_UNUSED_DEFAULT, INSTEP_UNUSED_SKIP, INSTEP_UNUSED_STEP_ZERO or INSTEP_UNUSED_REFUSE.
  uint32_t unused;
  // INSTEP_CLIP_NONE, _GLOBAL, _PREVIOUS or _PER_BUCKET.
  uint32_t clip;
  // The largest norm, if clip asks for one.
  double max_norm;
  // 1: a pass with an infinite or NaN gradient changes nothing. Refused in INSTEP_MODE_EAGER.
  uint32_t skip_nonfinite;
  // The type of a copy of each stepped parameter; 0: none.
  uint32_t copy;
  // Decay rate of moving averages; 0: none are kept.
  double ema_decay;
  // The factor in the loss, which steps divide out; 0: 1.
  double loss_scale;
  // A factor that follows the gradients, in the place of loss_scale; null: none.
  const instep_loss_scaler *loss_scaler;
  // Bytes of gradients per bucket; 0: 1 MiB for the first, 25 MiB for the others. Only on the stepper's own memory.
  uint64_t bucket_cap_bytes;
  // How long a collective waits for other ranks; 0: INSTEP_DEADLINE_MS, or 60,000.
  uint64_t deadline_ms;
  // Kernel threads; 0: INSTEP_THREADS, or one per core.
  uint32_t threads;
  // 1: everything runs on the thread that calls the stepper; with threads of 1 it starts none.
  uint32_t is_inline;
  // This rank, below world_size.
  uint32_t rank;
  // Number of ranks whose gradients are summed; 0: 1. Steps divide by it.
  uint32_t world_size;
  // Sums gradients over the ranks. Null, without sums_by_caller: there is one rank.
  const instep_collective *collective;
  // 1: the caller sums each bucket over all ranks, in place. On the CPU it hands a bucket over once the sum is there; on a GPU
  // with an event after the sum, by instep_stepper_bucket_ready_after. Parameters are equal on all ranks.
  uint32_t sums_by_caller;
  // Zero; anything else is refused.
  uint32_t reserved;
  // The caller's tensors; null: the stepper has its own.
  const instep_memory *memory;
  // The GPU; null: the CPU.
  const instep_cuda *cuda;
  // INSTEP_INPUTS_EVEN, _BY_WORLD_SIZE or _BY_CONTRIBUTORS: whether ranks may run out of data before others do.
  uint32_t inputs;
  // Zero; anything else is refused.
  uint32_t reserved_too;
} instep_stepper_options;

// The call did what it says.
#define INSTEP_OK 0

// A pointer is null that may not be. Nothing has changed.
#define INSTEP_NULL 1

// A handle was freed, is of another kind, or never came from this library. Nothing has changed.
#define INSTEP_HANDLE 2

// Another thread is in a call on the same handle, or the call was made by a callback. Nothing has changed; call again.
#define INSTEP_BUSY 3

// This process was forked from one that uses the library, whose threads it does not have. Nothing has changed.
#define INSTEP_FORKED 4

// An integer stands for nothing, a text is no UTF-8, a length is wrong, or a struct has a wrong size. Nothing has changed.
#define INSTEP_ARGUMENT 5

// An option or hyperparameter is out of range, or two options exclude each other. Nothing has changed.
#define INSTEP_CONFIG 6

// A parameter or tensor is unknown, named twice, missing, of another length, or misaligned. Nothing has changed.
#define INSTEP_LAYOUT 7

// The call comes at the wrong moment of a pass. Nothing has changed.
#define INSTEP_ORDER 8

// This machine, this build, or one of the parts that were combined cannot do it. Nothing has changed.
#define INSTEP_UNSUPPORTED 9

// The GPU kernels, the GPU's driver or its communication library is missing. Nothing has changed.
#define INSTEP_UNAVAILABLE 10

// A call into the GPU's driver failed.
#define INSTEP_DEVICE 11

// A collective failed, ranks differ, a rank is lost, or the deadline has passed.
#define INSTEP_COLLECTIVE 12

// The compiled kernels break the numerics contract. Nothing has changed.
#define INSTEP_ARITHMETIC 13

// A checkpoint is damaged, or of another model; the text says whether anything has changed.
#define INSTEP_CHECKPOINT 14

// A file could not be opened, read or written.
#define INSTEP_FILE 15

// An earlier failure ended this stepper or step; the text says which one. Free it.
#define INSTEP_POISONED 16

// The library met a fault of its own, now or in an earlier call on this handle. Free the handle, and report it.
#define INSTEP_PANIC 17

// A callback threw a C++ exception, which instep::caught of this header has stopped.
#define INSTEP_THREW 18

// A failure that this version has no code for; the text describes it.
#define INSTEP_OTHER 19

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Copies a tensor to `values`, as f32 for every precision: between passes any tensor, in a pass a parameter, or a gradient
// that was written in it. `count` is the parameter's number of elements.
//
// Any thread, one at a time. Between passes it waits for all steps, in a pass for the last step of the parameter's bucket.
instep_status instep_stepper_read(instep_stepper *stepper, instep_tensor_id tensor, float *values, size_t count);

// Copies `values` to a tensor, rounded to its type: a gradient in a pass, anything else but a copy between passes. `count` is
// the parameter's number of elements. After a parameter was written, the next pass gives every rank rank 0's of that
// bucket; every rank writes the same parameters. States and averages are written on every rank, with instep_stepper_set_progress.
//
// Any thread, one at a time. Waits as instep_stepper_read does.
instep_status instep_stepper_write(instep_stepper *stepper,
                                   instep_tensor_id tensor,
                                   const float *values,
                                   size_t count);

// Returns where a tensor lies, in the type that `*out_dtype` says, which may be null; 8-bit states have no address. `access` is
// INSTEP_READ or INSTEP_WRITE. In a pass, a gradient whose address was asked for to write counts as written, and holds the
// last pass's values until it is.
//
// In a pass the address is valid until the parameter is handed over, or the micro-batch ends. Between passes it is valid until
// the next call on this stepper. On a GPU, work on compute_stream may use it from here until then; only gradients are
// written through an address there, and a gradient counts as written with INSTEP_READ too.
//
// Any thread, one at a time. On the CPU it waits as instep_stepper_read does; on a GPU compute_stream waits.
instep_status instep_stepper_address(instep_stepper *stepper,
                                     instep_tensor_id tensor,
                                     uint32_t access,
                                     void **out_address,
                                     uint32_t *out_dtype);

// Takes the caller's tensors at other addresses, of a stepper that was created with memory. Parameters that are left out stay
// where they are, and so do the buckets. Other buckets than before are taken too: `*out_is_recut`, which may be null, is 1
// then. States and counts go along. A parameter at a new address holds the values that it had.
//
// Any thread, one at a time, between passes. On the CPU it waits for all steps, and then the old memory is the caller's. On a
// GPU work on compute_stream from here on comes after all that touches the old memory.
instep_status instep_stepper_rebind(instep_stepper *stepper,
                                    const instep_memory *tensors,
                                    uint32_t *out_is_recut);

// Takes part in one pass without data of its own: a rank that has no more data calls this until `*out_goes_on` is 0, which
// says that no rank had any, and that nothing was stepped. Needs `inputs` in the options.
//
// Any thread, one at a time, between passes. Waits for the pass's last sum.
instep_status instep_stepper_join(instep_stepper *stepper, uint32_t *out_goes_on);

// Lays the stepper's own buckets out anew, in the order in which rank 0 handed its gradients over; no bit of the training
// changes. `*out_is_rebuilt` is 0 if the order is the buckets' already; it may be null. Addresses of before are void. Borrowed
// buckets are the caller's to cut: instep_stepper_rebind takes them.
//
// Any thread, one at a time, between passes. Waits for all steps, and for rank 0.
instep_status instep_stepper_rebuild_buckets(instep_stepper *stepper,
                                             uint32_t *out_is_rebuilt);

// Writes the parameters alone to a safetensors file for other programs, which replaces the one at the path as a whole. With
// `averages` of 1 the moving averages take their place; with `is_f32` of 1 everything is f32, and a master takes the place of
// its parameter. Only rank 0 writes.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_export(instep_stepper *stepper,
                                    const char *path,
                                    uint32_t averages,
                                    uint32_t is_f32);

// Creates a bucket step. `*out_step` is written if it succeeds.
//
// Any thread. No other thread uses the layout meanwhile. No thread starts before the first step.
instep_status instep_bucket_step_create(const instep_bucket_step_options *options, instep_bucket_step **out_step);

// Steps the bucket: on the CPU before it returns, on a GPU by launches on `stream`, which must come after the sum of the
// gradients there. Nothing is written if it is refused.
//
// With `norm`, which has been decided, its coefficient clips, or the step is left out, and `scaling` is null. Without, the
// gradients have the factors of `scaling`; null: none.
//
// Any thread, one at a time for the step and the norm. `stream` (cudaStream_t or CUstream) is of the step's GPU, alive until
// it has passed the step, and not being captured; null is the legacy default stream, and what the CPU takes.
instep_status instep_bucket_step_step(instep_bucket_step *step,
                                      const instep_tensors *tensors,
                                      const instep_scaling *scaling,
                                      instep_norm *norm,
                                      void *stream);

// Sets the learning rate of a group from the next step on, as a schedule does; null is the group "default". All other
// hyperparameters stay.
//
// Any thread, one at a time. Never waits for a GPU.
instep_status instep_bucket_step_set_lr(instep_bucket_step *step, const char *group, double lr);

// Sets some hyperparameters of a group from the next step on, all of them or none; null is the group "default". Those that
// are left out stay. They keep the states that the step was created with.
//
// Any thread, one at a time. Never waits for a GPU.
instep_status instep_bucket_step_set_hyper(instep_bucket_step *step,
                                           const char *group,
                                           const instep_hyper *hypers,
                                           size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next step on; null is the group "default". Those that are left
// out become defaults, also if they were set before: to change some, call instep_bucket_step_set_lr or _set_hyper. The
// optimizer is of the same name, and keeps no other states. Step counts and states go on.
//
// Any thread, one at a time. Never waits for a GPU.
instep_status instep_bucket_step_set_optimizer(instep_bucket_step *step,
                                               const char *group,
                                               const instep_optimizer *optimizer);

// Reads how many updates a parameter has had, and the number that its optimizer carries beside that: NAdam's product of
// momenta, 1 in others. Either place may be null.
//
// Any thread, one at a time. On a GPU it waits for the last step.
instep_status instep_bucket_step_progress(instep_bucket_step *step,
                                          uint32_t param,
                                          uint64_t *out_count,
                                          double *out_carried);

// Sets both, when a training is resumed. `carried` is 1 but for NAdam, whose product of momenta comes with every count above 0.
// A count of 2^63 or more is refused.
//
// Any thread, one at a time. On a GPU it waits for the last step.
instep_status instep_bucket_step_set_progress(instep_bucket_step *step,
                                              uint32_t param,
                                              uint64_t count,
                                              double carried);

// Frees a bucket step. Null is allowed and does nothing.
//
// Any thread, one at a time; a step that another thread uses is INSTEP_BUSY and stays. On a GPU it waits for the last step.
instep_status instep_bucket_step_free(instep_bucket_step *step);

// Saves parameters, states, step counts and `scalars` to a file, which is replaced as a whole or left as it was. Only rank 0
// writes; other ranks may call it and return at once. `scalars` may be null if `scalar_count` is 0.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_save(instep_stepper *stepper,
                                  const char *path,
                                  const instep_scalar *scalars,
                                  size_t scalar_count);

// Loads a checkpoint into a stepper of the same parameters and optimizers, and the values of those `scalars` that it names.
// Every rank loads the same file. Nothing changes before the whole file has been found good.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_load(instep_stepper *stepper, const char *path, instep_scalar *scalars, size_t scalar_count);

// Returns the version of the library, as "0.1.0". The text lives as long as the process.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_version(void);

// Returns the name of a status, as "INSTEP_OK". The text lives as long as the process.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_status_name(instep_status status);

// Returns what was wrong in the last failed call on the calling thread: `<thing>: <what is wrong>; <what to do>`. Empty
// if none has failed. The text is the library's, and valid until the next call of this thread fails.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_last_error(void);

// Creates a layout without parameters. `*out_layout` is written if it succeeds.
//
// Any thread.
instep_status instep_layout_create(instep_layout **out_layout);

// Adds a parameter, whose number is `*out_param`: 0, 1, 2 and so on. `out_param` may be null. Add parameters in the order
// of forward. The first use of the layout closes it; after that this is INSTEP_ORDER.
//
// Any thread, one at a time. The struct is copied. A name that is there already, or a shape that is too large, is refused by
// the first use.
instep_status instep_layout_add(instep_layout *layout, const instep_param *param, uint32_t *out_param);

// Finds the number of a parameter by its name. INSTEP_LAYOUT if there is none, and the text lists similar names. This closes
// the layout.
//
// Any thread, one at a time.
instep_status instep_layout_find(instep_layout *layout, const char *name, uint32_t *out_param);

// Frees a layout. Null is allowed and does nothing.
//
// Any thread, one at a time; a layout that another thread uses is INSTEP_BUSY and stays.
instep_status instep_layout_free(instep_layout *layout);

// Creates a norm for buckets on a GPU, or, if `on` is null, on the CPU. `*out_norm` is written if it succeeds.
//
// Any thread.
instep_status instep_norm_create(const instep_cuda *on, instep_norm **out_norm);

// Begins anew, with the factors that all these gradients have; null: none. A clip is refused, since the norm decides it.
//
// Any thread, one at a time. On a GPU every call of a norm is enqueued on its `stream`, after the norm's last call on any
// stream; streams are as for instep_bucket_step_step.
instep_status instep_norm_begin(instep_norm *norm, const instep_scaling *scaling, void *stream);

// Adds the summed gradients of a bucket: once per bucket between beginning and decision, in any order. Parameters that are
// frozen or lack their gradient are left out; a bucket of such parameters alone still counts as added.
//
// Any thread, one at a time for the norm and the step. The gradients are only read.
instep_status instep_norm_add(instep_norm *norm, instep_bucket_step *step, const instep_tensor *grads, void *stream);

// Decides: clips by `max_norm` unless it is 0, and if `skip_nonfinite` is 1, leaves the steps out if a gradient is infinite
// or NaN. Then each bucket that was added is stepped with this norm, once. A norm without a bucket is refused.
//
// Any thread, one at a time.
instep_status instep_norm_decide(instep_norm *norm, double max_norm, uint32_t skip_nonfinite, void *stream);

// Reads the decision.
//
// Any thread, one at a time. On a GPU it waits for the norm's last call.
instep_status instep_norm_read(instep_norm *norm, instep_decision *out_decision);

// Frees a norm. Null is allowed and does nothing.
//
// Any thread, one at a time; a norm that another thread uses is INSTEP_BUSY and stays.
instep_status instep_norm_free(instep_norm *norm);

// Names one state that an optimizer keeps per element, as torch.optim calls it; `out_name` becomes null if `index` is the
// number of its states. The text lives as long as the process. States are lent to a bucket step in this order, and
// checkpoints name them so.
//
// Any thread.
instep_status instep_optimizer_state_name(const instep_optimizer *optimizer, size_t index, const char **out_name);

// Opens a pass: one forward and backward. 0 and 1 stand for one micro-batch; of several, the first write of a gradient
// replaces, later ones are the caller's to add, and buckets are stepped in the last. In the first pass all ranks take rank 0's
// parameters; after parameters were written, those of their buckets.
//
// Any thread, one at a time. Does not wait, but on a GPU for the other ranks' calls after parameters were written.
instep_status instep_stepper_begin(instep_stepper *stepper,
                                   uint32_t micro_batches);

// Goes on to the next micro-batch: every parameter is the caller's again, and the gradients stay.
//
// Any thread, one at a time. Does not wait.
instep_status instep_stepper_next_micro_batch(instep_stepper *stepper);

// Hands over a parameter: its gradient is written, and neither is used any more in this pass. Once its bucket is complete, it
// is reduced and stepped, as the mode says. Addresses of the parameter and of its gradient are no longer valid.
//
// Any thread, one at a time. Does not wait, unless the stepper is inline. On a GPU it covers what was enqueued on
// compute_stream.
instep_status instep_stepper_grad_ready(instep_stepper *stepper,
                                        uint32_t param);

// Hands over all parameters of a bucket. Buckets of borrowed memory are numbered as they were given. With sums_by_caller it says
// that the bucket's sum is there, which on a GPU only instep_stepper_bucket_ready_after can say.
//
// Any thread, one at a time. As for instep_stepper_grad_ready.
instep_status instep_stepper_bucket_ready(instep_stepper *stepper,
                                          uint32_t bucket);

// Hands over all parameters of a bucket whose sum the caller makes, on a GPU and with sums_by_caller: its step waits for `event`
// (cudaEvent_t or CUevent). The event was recorded in this pass after the bucket's sum, which comes after the pass's last write
// of a gradient of the bucket and its last read of a parameter of the bucket. An event that was never recorded, or too early,
// lets the step race with the sum. The wait is enqueued in this call, so the event may be destroyed or recorded again after it.
//
// Any thread, one at a time. Does not wait.
instep_status instep_stepper_bucket_ready_after(instep_stepper *stepper,
                                                uint32_t bucket,
                                                void *event);

// Leaves parameters alone in the open pass, because no rank has a gradient for them. Not with INSTEP_UNUSED_SKIP, which counts
// for itself. All ranks name the same ones, before they hand them over. A gradient that was written is discarded.
//
// Any thread, one at a time. Does not wait.
instep_status instep_stepper_set_unused(instep_stepper *stepper,
                                        const uint32_t *params,
                                        size_t param_count);

// Closes the pass. Gradients that were written are handed over; for the others `unused` says what happens. With sums_by_caller
// only a hand-over says that a sum is there, so a bucket that was written and not handed over is INSTEP_ORDER. If it is
// INSTEP_ORDER the pass stays open, to be mended or abandoned.
//
// Any thread, one at a time. Does not wait: the steps run beside what comes next, and the next access waits for its bucket.
instep_status instep_stepper_finish(instep_stepper *stepper);

// Gives the pass up: what has not been launched is discarded. In INSTEP_MODE_EAGER, buckets that were launched stay stepped:
// `*out_count` is their number, and the first `capacity` of them are written to `out_buckets`. Both may be null.
//
// Any thread, one at a time. Does not wait, but for a pass that broadcasts parameters. Ranks abandon together, after the same
// bucket.
instep_status instep_stepper_abandon(instep_stepper *stepper,
                                     uint32_t *out_buckets,
                                     size_t capacity,
                                     size_t *out_count);

// Sets the learning rate of a group from the next pass on, as a schedule does; null is the group "default". All other
// hyperparameters stay. All ranks set the same.
//
// Any thread, one at a time, between passes. Does not wait for steps.
instep_status instep_stepper_set_lr(instep_stepper *stepper, const char *group, double lr);

// Sets some hyperparameters of a group from the next pass on, all of them or none; null is the group "default". Those that
// are left out stay. All ranks set the same.
//
// Any thread, one at a time, between passes. Does not wait for steps.
instep_status instep_stepper_set_hyper(instep_stepper *stepper,
                                       const char *group,
                                       const instep_hyper *hypers,
                                       size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next pass on; null is the group "default". Those that are left
// out become defaults, also if they were set before: to change some, call instep_stepper_set_lr or _set_hyper. The optimizer
// is of the same name. All ranks set the same.
//
// Any thread, one at a time, between passes. Does not wait for steps.
instep_status instep_stepper_set_optimizer(instep_stepper *stepper,
                                           const char *group,
                                           const instep_optimizer *optimizer);

// Freezes a parameter from the next pass on, or unfreezes it: frozen, it takes no gradient and is not stepped. All ranks
// freeze the same.
//
// Any thread, one at a time, between passes. To freeze, it waits for the last step of the parameter's bucket.
instep_status instep_stepper_set_frozen(instep_stepper *stepper, uint32_t param, uint32_t is_frozen);

// Reads how many updates a parameter has had, and the number that its optimizer carries beside that: NAdam's product of
// momenta, 1 in others. Either place may be null.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_progress(instep_stepper *stepper, uint32_t param, uint64_t *out_count, double *out_carried);

// Sets both, when a training is resumed without a checkpoint of this library. `carried` is 1 but for NAdam, whose product of
// momenta comes with every count above 0. A count of 2^63 or more is refused. All ranks set the same.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_set_progress(instep_stepper *stepper, uint32_t param, uint64_t count, double carried);

// Reads the factor in the loss of the pass to come, or of the open one.
//
// Any thread, one at a time. With a loss_scaler it waits for the decision of the pass before: ask after forward.
instep_status instep_stepper_loss_scale(instep_stepper *stepper, double *out_loss_scale);

// Reads the norm that a group was clipped by in the last pass, and whether it is known; null is the group "default". It is the
// group's own if the group is clipped alone, that of all unclipped groups if it is not clipped, and otherwise that of the
// status. It is not known where that is not, or after instep_stepper_rebuild_buckets.
//
// Any thread, one at a time, between passes. Waits for all steps.
instep_status instep_stepper_group_norm(instep_stepper *stepper,
                                        const char *group,
                                        double *out_norm,
                                        uint32_t *out_has_norm);

// Reads what was decided about a pass. With `waits` of 1 it is the last one; with 0 the newest that is known to have ended.
//
// Any thread, one at a time. With 1 between passes only, and it waits for all steps; with 0 it never waits.
instep_status instep_stepper_status(instep_stepper *stepper, uint32_t waits, instep_pass_status *out_status);

// Creates a stepper. `*out_stepper` is written if it succeeds.
//
// Any thread. No other thread uses the layout meanwhile. Threads start at the first pass. On a GPU, NCCL excepted, all
// ranks create theirs at the same point.
instep_status instep_stepper_create(const instep_stepper_options *options, instep_stepper **out_stepper);

// Frees a stepper after all steps have ended, and reports what has failed. It is freed also if this fails with anything but
// INSTEP_BUSY, INSTEP_HANDLE or INSTEP_FORKED: with INSTEP_ORDER a pass was open, which ends the other ranks too. Null is
// allowed and does nothing.
//
// Any thread, one at a time. It waits for steps, and for peers that a queued sum needs, up to the deadline.
instep_status instep_stepper_free(instep_stepper *stepper);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* INSTEP_H */

#if defined(__cplusplus)
namespace instep {
/*
 * Makes a callback of a function that may throw. An exception becomes INSTEP_THREW, which ends the stepper:
 * `collective.enqueue = instep::caught<sum>;`
 */
template <instep_status (*function)(void *, const instep_call *)>
instep_status caught(void *data, const instep_call *call) noexcept {
  try {
    return function(data, call);
  } catch (...) {
    return INSTEP_THREW;
  }
}
} /* namespace instep */
#endif
