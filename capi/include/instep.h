/*
 * instep: fused optimizer steps over whole gradient buckets, overlapped with backward. docs/c.md has the examples.
 *
 * Written by cbindgen from capi/src; `UPDATE=1 cargo test -p instep-capi header` writes it again.
 *
 * Status: every function that can fail returns a status. Results go to the places at the end of the arguments, and only if
 * the call succeeds.
 *
 * Handles: instep_layout, instep_bucket_step, instep_norm and instep_stepper. A handle is no address. The library refuses a
 * handle that is null, freed or of another kind. Two threads may not use one handle at the same time: the second one gets
 * INSTEP_BUSY. All other calls may run at the same time.
 *
 * Structs: a struct that begins with `size` may grow in later versions. Set `size` to sizeof the struct and all other fields
 * to zeros, which stand for defaults. A library accepts structs of older programs, and structs of newer programs if they use
 * nothing new. The caller owns a struct and the memory at its pointers, and the library reads both only during the call,
 * unless the struct says otherwise.
 *
 * Processes: after the first handle, a forked child gets INSTEP_FORKED from every call that can fail. dlclose leaves the
 * library in memory, because its threads may still run.
 */

#ifndef INSTEP_H
#define INSTEP_H

#include <stddef.h>
#include <stdint.h>

// A kind of instep_scalar: a real number.
#define INSTEP_NUMBER 0

// A kind of instep_scalar: a whole number, such as an epoch or a seed.
#define INSTEP_INTEGER 1

// A load sets an instep_scalar to this kind if the checkpoint has no number with the scalar's name.
#define INSTEP_ABSENT 2

// Element type: float, IEEE 754 binary32. In a field for an element type, 0 means the default that the field's comment
// names.
#define INSTEP_F32 1

// Element type: bfloat16.
#define INSTEP_BF16 2

// Element type: IEEE 754 binary16.
#define INSTEP_F16 3

// 16-bit parameters have no master weight. The default.
#define INSTEP_MASTER_NONE 0

// Each 16-bit parameter has a separate f32 weight.
#define INSTEP_MASTER_F32 1

// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores the lower 16 bits of the weight.
#define INSTEP_MASTER_REMAINDER16 2

// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores bits 8 to 15 of the weight.
#define INSTEP_MASTER_REMAINDER8 3

// The stepper's clip applies to all groups with this value together. The default.
#define INSTEP_GROUP_CLIP_TOGETHER 0

// A group is clipped alone, by the exact norm of its own gradients. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_ALONE 1

// A group is not clipped. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_NONE 2

// Optimizer states are f32. The default.
#define INSTEP_STATES_F32 0

// Optimizer states are bf16.
#define INSTEP_STATES_BF16 1

// Optimizer states are 8-bit codes, with an f32 scale per 256 elements.
#define INSTEP_STATES_8BIT 2

// Steps a bucket as soon as it is reduced. The default.
#define INSTEP_MODE_EAGER 0

// Steps all buckets after the last bucket is reduced and the norm is known.
#define INSTEP_MODE_NORMED 1

// Steps all buckets after the last sum, one bucket after the other.
#define INSTEP_MODE_SEQUENTIAL 2

// A step does not change the gradients of stepped parameters: they are still the sums over the ranks. The default.
#define INSTEP_GRADIENTS_KEEP 0

// The step zeroes the gradients that it has read.
#define INSTEP_GRADIENTS_ZERO 1

// The memory of stepped gradients is returned to the system. This option requires Linux, and a stepper on the CPU that
// owns its memory.
#define INSTEP_GRADIENTS_RELEASE 2

// The step overwrites each gradient with the value that it used: the mean over ranks, divided by the loss scale and
// clipped.
#define INSTEP_GRADIENTS_AVERAGE 3

// Means INSTEP_UNUSED_SKIP if the stepper owns its buckets and sums them, and INSTEP_UNUSED_REFUSE otherwise.
#define INSTEP_UNUSED_DEFAULT 0

// A parameter is not stepped if no rank wrote its gradient. This option is refused if the buckets are in the caller's
// memory, because such buckets have no room for the number of ranks that used each parameter.
#define INSTEP_UNUSED_SKIP 1

// If no rank wrote a parameter's gradient, zeros are written to the gradient's memory and the parameter is stepped
// with them.
#define INSTEP_UNUSED_STEP_ZERO 2

// If a gradient was not written, instep_stepper_finish returns an error that names the parameter, and the pass stays
// open.
#define INSTEP_UNUSED_REFUSE 3

// All ranks have the same number of batches. The default.
#define INSTEP_INPUTS_EVEN 0

// A rank that runs out of data calls instep_stepper_join. Summed gradients are divided by world_size.
#define INSTEP_INPUTS_BY_WORLD_SIZE 1

// A rank that runs out of data calls instep_stepper_join. Summed gradients are divided by the number of ranks that had
// data in the pass.
#define INSTEP_INPUTS_BY_CONTRIBUTORS 2

// The optimizer steps the parameter. The default.
#define INSTEP_ACTION_STEP 0

// The library averages the parameter's gradient over the ranks, so that another optimizer can step the parameter.
#define INSTEP_ACTION_AVERAGE 1

// The library changes neither the parameter nor its summed gradient.
#define INSTEP_ACTION_LEAVE 2

// Nothing is clipped. The default.
#define INSTEP_CLIP_NONE 0

// Clips by the exact norm of all gradients. Refused in INSTEP_MODE_EAGER.
#define INSTEP_CLIP_GLOBAL 1

// Clips by the norm of the previous pass.
#define INSTEP_CLIP_PREVIOUS 2

// Clips each bucket by that bucket's norm.
#define INSTEP_CLIP_PER_BUCKET 3

// The parameter itself. If the parameter has a master weight, instep_stepper_read copies the master's values.
#define INSTEP_PARAM 0

// A parameter's gradient. After a pass with INSTEP_GRADIENTS_KEEP, the gradient of a stepped parameter is the sum over
// the ranks (if is_local is 1, this rank's own gradient), still multiplied by the loss scale.
#define INSTEP_GRAD 1

// A state of the parameter's optimizer. The state's name must be given.
#define INSTEP_STATE 2

// The parameter's copy in another type.
#define INSTEP_COPY 3

// The parameter's moving average.
#define INSTEP_EMA 4

// The address is for reading.
#define INSTEP_READ 0

// The address is for writing and reading.
#define INSTEP_WRITE 1

// A collective call: every rank gets the sum over all ranks, with the same bits on each.
#define INSTEP_ALL_REDUCE 0

// A collective call: every rank gets rank 0's data.
#define INSTEP_BROADCAST 1

// The largest number of states that an optimizer has per element.
#define INSTEP_STATES_AT_MOST 4

// The step of one bucket, with its step counts and hyperparameters. A bucket step has no tensors: they are passed with
// each call.
//
// The caller owns the bucket step until instep_bucket_step_free. Any thread may use the bucket step, but only one
// thread at a time: a second thread gets INSTEP_BUSY. Different bucket steps may be used at the same time.
typedef struct instep_bucket_step instep_bucket_step;

// The names, shapes and groups of a model's parameters.
//
// The caller owns the layout until instep_layout_free. Bucket steps and steppers copy what they need from the layout,
// so the layout may be freed once they are created. Any thread may use the layout, but only one thread at a time: a
// second thread gets INSTEP_BUSY.
typedef struct instep_layout instep_layout;

// The norm over the gradients of any number of buckets. The norm decides whether the steps of these buckets are
// clipped or skipped.
//
// The caller owns the norm until instep_norm_free. Any thread may use the norm, but only one thread at a time: a
// second thread gets INSTEP_BUSY.
typedef struct instep_norm instep_norm;

// The training of one rank: its parameters, gradients and states, and the passes that step the parameters.
//
// The caller owns the stepper until instep_stepper_free. Any thread may use the stepper, but only one thread at a
// time: a second thread gets INSTEP_BUSY. If compute_stream is the per-thread default stream (the value 2), only the
// thread that created the stepper may use the stepper.
typedef struct instep_stepper instep_stepper;

// The outcome of a call. INSTEP_OK is 0. Any other value is a failure, which instep_last_error describes. Later
// versions may add codes, but do not change the numbers of existing codes.
typedef int32_t instep_status;

// Names a tensor of a stepper.
typedef struct {
  // INSTEP_PARAM, INSTEP_GRAD, INSTEP_STATE, INSTEP_COPY or INSTEP_EMA.
  uint32_t kind;
  // The parameter's number.
  uint32_t param;
  // The state's name, from instep_optimizer_state_name. Null for any other kind.
  const char *state;
} instep_tensor_id;

// A flat bucket of gradients in the caller's memory.
typedef struct {
  // The first element.
  void *address;
  // The number of elements, gaps included.
  size_t elements;
  // The numbers of the parameters that have their gradients in this bucket.
  const uint32_t *params;
  // The offset of each gradient in the bucket, in elements.
  const size_t *offsets;
  // The number of parameters in `params`.
  size_t param_count;
} instep_bucket;

// The caller's tensors. These tensors are in the memory of the stepper's device. The layout and the precisions
// determine the tensors' element types. All gradients of a bucket must have one type.
//
// The stepper reads and writes the tensors until instep_stepper_free has returned. The caller may write a gradient
// after a call of instep_stepper_address with INSTEP_WRITE, and may read a parameter after a call of
// instep_stepper_address. On the CPU, the caller may also write a parameter after a call between passes with
// INSTEP_WRITE. Each permission ends when the address becomes invalid (see instep_stepper_address). At all other times
// the caller must not touch gradients or parameters.
typedef struct {
  // sizeof(instep_memory).
  size_t size;
  // The addresses of all parameters, in the order of their numbers.
  void *const *params;
  // The number of parameters of the layout. In instep_stepper_rebind, 0 means that no parameter has moved.
  size_t param_count;
  // All buckets. Buckets are numbered in the order of this list. Every parameter must be in exactly one bucket.
  const instep_bucket *buckets;
  // The number of buckets. In instep_stepper_rebind, 0 means that the buckets have not changed.
  size_t bucket_count;
} instep_memory;

// One hyperparameter.
typedef struct {
  // The hyperparameter's name in torch.optim, such as "lr" or "weight_decay". A pair such as betas is two
  // hyperparameters with two names, "beta1" and "beta2".
  const char *name;
  // Its value. Flags are 0 or 1.
  double value;
} instep_hyper;

// An optimizer and its hyperparameters. A call that receives this struct reads the struct, its list and its texts only
// before the call returns. The library never frees this memory.
typedef struct {
  // sizeof(instep_optimizer).
  size_t size;
  // The optimizer's name in torch.optim or in its paper, in upper or lower case, such as "AdamW", "sgd" or "lamb".
  const char *name;
  // The given hyperparameters. All others have their defaults.
  const instep_hyper *hypers;
  // The number of hyperparameters in `hypers`.
  size_t hyper_count;
} instep_optimizer;

// Element types of the tensors. Arithmetic is in f32 for all element types.
typedef struct {
  // sizeof(instep_precision).
  size_t size;
  // Type of parameters. 0: INSTEP_F32.
  uint32_t param;
  // Type in which gradients are stored and summed. 0: INSTEP_F32.
  uint32_t grad;
  // How the low bits of 16-bit parameters are stored: INSTEP_MASTER_NONE, _F32, _REMAINDER16 or _REMAINDER8.
  uint32_t master;
  // Storage of optimizer states: INSTEP_STATES_F32, _BF16 or _8BIT.
  uint32_t states;
  // 1: values that are stored in fewer bits than f32 are rounded stochastically. 0: they are rounded to nearest.
  uint32_t is_stochastic;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // Seed of stochastic rounding, equal on all ranks.
  uint64_t seed;
} instep_precision;

// The optimizer and the precision of one group of parameters.
typedef struct {
  // The group's name.
  const char *name;
  // Its optimizer. Null: the default optimizer of the options.
  const instep_optimizer *optimizer;
  // Its element types. Null: the default precision of the options. This field must be null for a bucket step,
  // because a bucket step has only one precision.
  const instep_precision *precision;
  // INSTEP_GROUP_CLIP_TOGETHER, _ALONE or _NONE. This field must be 0 for a bucket step, because an instep_norm
  // decides the clip of bucket steps.
  uint32_t clip;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // If the group is clipped alone, the norm to which its gradients are limited. Otherwise 0.
  double max_norm;
} instep_group;

// A GPU and its options.
typedef struct {
  // sizeof(instep_cuda).
  size_t size;
  // The number of the CUDA device.
  uint32_t ordinal;
  // CUDA priority of the stream on which a stepper's steps run. A lower number is a higher priority.
  int32_t optim_priority;
  // The stream (cudaStream_t or CUstream) of the caller's own work on a stepper's tensors, such as forward and
  // backward. Null: the legacy default stream. Bucket steps and norms ignore this field, because each of their calls
  // takes a stream.
  void *compute_stream;
  // Largest number of thread blocks of a step. A step is divided into tiles of elements. 0: each block steps one
  // tile if the step of a tile reads and writes at least 38 KiB on average, and otherwise so many tiles that the
  // block reads and writes about 224 KiB, or fewer tiles if the launch would have too few blocks for the GPU.
  uint32_t max_blocks;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_cuda;

// Options of a bucket step. A field that is 0 or null has its default, but `layout` and `optimizer` must be given. The
// library reads these options, and the structs, lists and texts in them, only until instep_bucket_step_create returns.
// The library never frees this memory.
typedef struct {
  // sizeof(instep_bucket_step_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // The optimizer of all groups that `groups` does not name.
  const instep_optimizer *optimizer;
  // Groups with their own optimizers.
  const instep_group *groups;
  // The number of groups.
  size_t group_count;
  // The parameters of the bucket. Null: the bucket has all parameters of the layout in order, without gaps.
  const uint32_t *params;
  // For each parameter in `params`, its offset in the bucket, in elements.
  const size_t *offsets;
  // The number of parameters in `params`.
  size_t param_count;
  // The number of elements of the bucket, gaps included. Without `params` this number is ignored.
  size_t elements;
  // Element types. Null: f32.
  const instep_precision *precision;
  // Element type of copies. A step writes a copy of each parameter that it steps. 0: there are no copies.
  uint32_t copy;
  // INSTEP_GRADIENTS_KEEP, _ZERO or _AVERAGE.
  uint32_t gradients;
  // Decay rate of the parameters' moving averages. 0: there are no averages.
  double ema_decay;
  // Number of threads of a step on the CPU, including the caller's, at most 1024. 0: only the caller's. Bucket steps
  // with the same number of threads share one thread pool, which lives as long as the process.
  uint32_t threads;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The GPU. Null: the CPU.
  const instep_cuda *cuda;
  // One number for each parameter in `params`. 0: the parameter is full. Any other number: the parameter is a shard
  // that consists of rows of a full parameter, and the number is the length of a row in elements. Null: all
  // parameters are full. For each element, stochastic rounding and the block of 8-bit states are the same in a shard
  // as in the full parameter. With 8-bit states, each row of states, scales, masters, copies and averages starts at
  // a multiple of 256 elements.
  const uint64_t *row_elements;
  // One number for each parameter in `params`. For a shard, the number is the index of the shard's first element.
  // The index counts the elements of all full parameters of the model, one parameter after the other. For a full
  // parameter the number is ignored. Without `row_elements` the list is ignored.
  const uint64_t *first_elements;
} instep_bucket_step_options;

// The memory of one kind of tensor in a bucket, such as its gradients. The memory is one range with the bucket's
// offsets, or one range for each parameter. If all fields are zero, there is no tensor of this kind.
typedef struct {
  // The first element of the range. This field is null if each parameter has its own range.
  void *address;
  // For each parameter, the first element of its range, in the order of the bucket. This field is null if all
  // parameters share one range. On a GPU, only parameters and gradients may have a range per parameter. If a
  // gradient's address is null, its parameter has no gradient in this call. A step does not change the tensors or
  // the step count of a parameter without a gradient, and norms leave the parameter out.
  void *const *addresses;
  // The number of elements of the range, or the length of `addresses`. The library checks that `count` is the
  // bucket's number of elements or of parameters.
  size_t count;
} instep_tensor;

// The tensors of one step.
//
// The caller owns the memory. Until the call returns, only the step may touch the memory. On a GPU, only the step may
// touch the memory until the step on the stream has ended. Addresses must be aligned to an element, and no two tensors
// may overlap.
typedef struct {
  // sizeof(instep_tensors).
  size_t size;
  // Parameters, in the type that the precision gives.
  instep_tensor params;
  // Summed gradients, in the type that the precision gives.
  instep_tensor grads;
  // Master weights or remainders, if the precision has them. Before the first step, an f32 master must have its
  // parameter's value, and remainders must be zeros.
  instep_tensor master;
  // Copies of the parameters in another type, if the options ask for copies. The step only writes them.
  instep_tensor copy;
  // Moving averages in f32, if the options ask for them.
  instep_tensor ema;
  // The optimizer's states, in the order of instep_optimizer_state_name. The states must be zeros before the first
  // step.
  instep_tensor states[INSTEP_STATES_AT_MOST];
  // The scales of 8-bit states: one float per 256 elements of the bucket.
  instep_tensor scales[INSTEP_STATES_AT_MOST];
} instep_tensors;

// Numbers by which a step divides the gradients, and a clip coefficient. The step multiplies each gradient by clip /
// (world_size * loss_scale). A field that is 0 counts as 1.
typedef struct {
  // sizeof(instep_scaling).
  size_t size;
  // The number of ranks over which the gradients were summed.
  uint32_t world_size;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The factor by which the loss was multiplied.
  double loss_scale;
  // A clip coefficient that the caller has computed, from 0 to 1.
  double clip;
  // Null, or the loss scale in the memory of the step's device. It replaces loss_scale (GradScaler's _scale). The
  // value is read when the step runs.
  const float *grad_scale;
  // Null, or a flag in the memory of the step's device. If the flag is not 0, the step changes nothing (GradScaler's
  // found_inf).
  const float *found_inf;
} instep_scaling;

// A named number of the caller, such as the epoch. A checkpoint stores such numbers together with the stepper's
// values.
typedef struct {
  // The number's name, such as "epoch". Names that begin with "param.", "state." or "ema." are reserved.
  const char *name;
  // INSTEP_NUMBER or INSTEP_INTEGER. A load changes this field to INSTEP_ABSENT if the file does not have the
  // number.
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
  // The parameter's name. Checkpoints use it too. No two parameters may have the same name.
  const char *name;
  // The lengths of the parameter's dimensions. The product of these lengths is the number of elements. A parameter
  // without dimensions is a scalar and has one element.
  const size_t *shape;
  // The number of dimensions.
  size_t dimensions;
  // The parameter's group. The group's optimizer steps the parameter. Null: "default".
  const char *group;
  // How often the parameter is handed over in a pass. 0 and 1 mean once. A parameter that several modules share is
  // handed over once for each use.
  uint32_t uses;
  // INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE or INSTEP_ACTION_LEAVE.
  uint32_t action;
  // 1: each rank has its own parameter, and the gradient is not summed. 0: all ranks have the same parameter.
  uint32_t is_local;
  // Element type of the parameter and of its gradient. 0: the precision of the parameter's group gives both types.
  uint32_t dtype;
} instep_param;

// The decision that follows from a norm.
typedef struct {
  // sizeof(instep_decision), set by the caller.
  size_t size;
  // The norm of all averaged gradients. The norm is infinite or NaN if a gradient is infinite or NaN.
  double norm;
  // The clip coefficient. The coefficient is 1 if nothing is clipped or all steps are skipped.
  double clip;
  // 1 if no gradient is infinite or NaN.
  uint32_t is_finite;
  // 1 if steps with this decision are skipped. They then change nothing.
  uint32_t is_skipped;
} instep_decision;

// The decisions about one pass, such as its clip coefficient and whether it was skipped.
typedef struct {
  // sizeof(instep_pass_status), set by the caller.
  size_t size;
  // The number of the pass, counted from 1. Abandoned passes count too. 0: no pass has ended.
  uint64_t pass;
  // Number of passes abandoned so far.
  uint64_t abandoned;
  // 1: the pass changed nothing, because a gradient was infinite or NaN.
  uint32_t is_skipped;
  // 1: `norm` is known.
  uint32_t has_norm;
  // The norm of all averaged gradients.
  double norm;
  // The clip coefficient. It is 1 without clipping.
  double clip;
  // The loss scale, by which the gradients were divided.
  double loss_scale;
  // The first bucket with an infinite or NaN gradient, or -1.
  int64_t first_nonfinite_bucket;
} instep_pass_status;

// A dynamic loss scale with the policy of torch.amp.GradScaler. A field that is 0 has the default given below.
typedef struct {
  // sizeof(instep_loss_scaler).
  size_t size;
  // The first pass's scale. Default: 65536.
  double initial_scale;
  // The scale is multiplied by this factor after growth_interval consecutive passes without a skip. Default: 2.
  double growth_factor;
  // The scale is multiplied by this factor after a skipped pass. Default: 0.5.
  double backoff_factor;
  // The scale grows after this number of consecutive passes without a skip. Default: 2000.
  uint32_t growth_interval;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_loss_scaler;

// One collective call of one rank.
typedef struct {
  // The size of instep_call in the library. This size may exceed the one in the caller's header.
  size_t size;
  // INSTEP_ALL_REDUCE or INSTEP_BROADCAST.
  uint32_t kind;
  // Element type: INSTEP_F32, INSTEP_BF16 or INSTEP_F16.
  uint32_t dtype;
  // The source, a range of `bytes` bytes.
  const void *src;
  // The destination, a range of `bytes` bytes. The destination may be the same range as the source.
  void *dst;
  // Length of the source and of the destination, in bytes.
  uint64_t bytes;
  // The number of the pass, counted from the stepper's first pass.
  uint64_t pass;
  // The number of the bucket, or -1 if the call is not for a bucket.
  int64_t bucket;
  // How long the call may wait for other ranks, in milliseconds.
  uint64_t deadline_ms;
  // On a GPU, the stream on which `enqueue` must enqueue its work. Null on the CPU.
  void *stream;
  // 32 bytes that must be equal on all ranks. If these bytes differ between ranks, return a failure, because the
  // ranks make different calls and would hang later.
  uint8_t key[32];
} instep_call;

// One rank's part in the caller's collective. The library copies this struct, and passes `data` to each function.
//
// A function of this struct may call only instep_version, instep_status_name and instep_last_error. Any other library
// call from such a function returns INSTEP_BUSY. An exception that leaves a function of this struct ends the process.
// instep::caught, at the end of this header, turns an exception into a status.
typedef struct {
  // sizeof(instep_collective).
  size_t size;
  // The caller's data. The data must be usable on any thread until instep_stepper_free has returned. If
  // instep_stepper_create fails, the library does not use the data.
  void *data;
  // Takes part in one collective call, and returns INSTEP_OK. Any other return value ends the stepper. On the CPU,
  // the library makes one call at a time, on its own thread or, with is_inline, on the thread that calls the
  // stepper. On the CPU, the function may block until all ranks are done, and must write the result to `dst` before
  // it returns. On a GPU, the thread that calls the stepper makes the call. On a GPU, the function must enqueue its
  // work on the call's stream, and must not wait for that work. Every rank makes the same calls in the same order.
  // Not null.
  instep_status (*enqueue)(void *data, const instep_call *call);
  // Ends the group: every rank's current call and all later calls must then fail. It must not block. `cause` is
  // valid during the call. The library may call this function on any thread, also during `enqueue`. The function may
  // be null if there is only one rank.
  void (*abort)(void *data, const char *cause);
  // instep_stepper_free calls this function once, when the library no longer uses `data`. The function may be null.
  void (*release)(void *data);
  // 1: the collective can also sum bf16.
  uint32_t sums_bf16;
  // 1: the collective can also sum f16.
  uint32_t sums_f16;
  // 1: the collective works on the memory of GPUs. 0: it works on the memory of the CPU.
  uint32_t reaches_gpus;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_collective;

// Options of a stepper. A field that is 0 or null has its default, but `layout` and `optimizer` must be given. The
// library reads these options, and the structs, lists and texts in them, only until instep_stepper_create returns. The
// library never frees this memory. The library uses the caller's tensors, the collective's data and the stream until
// the stepper is freed.
typedef struct {
  // sizeof(instep_stepper_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // The optimizer of all groups that `groups` does not name.
  const instep_optimizer *optimizer;
  // Groups with their own optimizers.
  const instep_group *groups;
  // The number of groups.
  size_t group_count;
  // Element types. Null: f32.
  const instep_precision *precision;
  // When steps run: INSTEP_MODE_EAGER, INSTEP_MODE_NORMED or INSTEP_MODE_SEQUENTIAL. All modes give each parameter
  // the same bits if nothing is clipped or skipped.
  uint32_t mode;
  // INSTEP_GRADIENTS_KEEP, _ZERO, _AVERAGE or _RELEASE.
  uint32_t gradients;
  // INSTEP_UNUSED_DEFAULT, INSTEP_UNUSED_SKIP, INSTEP_UNUSED_STEP_ZERO or INSTEP_UNUSED_REFUSE.
  uint32_t unused;
  // INSTEP_CLIP_NONE, _GLOBAL, _PREVIOUS or _PER_BUCKET.
  uint32_t clip;
  // If `clip` is set, gradients with a larger norm than this value are clipped to this value.
  double max_norm;
  // 1: a pass with an infinite or NaN gradient changes nothing. Refused in INSTEP_MODE_EAGER.
  uint32_t skip_nonfinite;
  // Element type of copies. A step writes a copy of each parameter that it steps. 0: there are no copies.
  uint32_t copy;
  // Decay rate of the parameters' moving averages. 0: there are no averages.
  double ema_decay;
  // The loss scale, by which steps divide the gradients. 0 means 1.
  double loss_scale;
  // A dynamic loss scale instead of loss_scale. Null: none.
  const instep_loss_scaler *loss_scaler;
  // Bytes of gradients per bucket. 0: 1 MiB for the first bucket, 25 MiB for all others. This option is only for
  // buckets in the stepper's own memory.
  uint64_t bucket_cap_bytes;
  // How long a collective waits for other ranks, in milliseconds. 0: the value of the environment variable
  // INSTEP_DEADLINE_MS, or 60,000 if it is not set.
  uint64_t deadline_ms;
  // Number of threads on which kernels run. 0: the value of the environment variable INSTEP_THREADS. If the variable
  // is not set, there is one thread per core, but at most 1024.
  uint32_t threads;
  // 1: the stepper's work runs on the thread that calls the stepper. Kernels still use further threads, unless
  // `threads` is 1. If `threads` is 1 too, the stepper starts no thread.
  uint32_t is_inline;
  // This rank, below world_size.
  uint32_t rank;
  // Number of ranks over which gradients are summed. 0 means 1. Steps divide the sums by this number.
  uint32_t world_size;
  // The collective that sums gradients over the ranks. Null: there is only one rank, or sums_by_caller is 1.
  const instep_collective *collective;
  // 1: the caller sums each bucket over all ranks, in place. On the CPU, the caller hands a bucket over once the sum
  // is complete. On a GPU, the caller calls instep_stepper_bucket_ready_after with an event that was recorded after
  // the sum. With this option, the library broadcasts nothing, so parameters must be equal on all ranks.
  uint32_t sums_by_caller;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The caller's tensors. Null: the stepper allocates its own tensors.
  const instep_memory *memory;
  // The GPU. Null: the CPU.
  const instep_cuda *cuda;
  // Whether some ranks may run out of data before others: INSTEP_INPUTS_EVEN, _BY_WORLD_SIZE or _BY_CONTRIBUTORS.
  uint32_t inputs;
  // Zero. Anything else is refused.
  uint32_t reserved_too;
} instep_stepper_options;

// The call succeeded.
#define INSTEP_OK 0

// A pointer is null but must not be null. Nothing has changed.
#define INSTEP_NULL 1

// A handle was freed, is of another kind, or never came from this library. Nothing has changed.
#define INSTEP_HANDLE 2

// Another thread is in a call on the same handle, or the call was made by a callback. Nothing has changed; call again.
#define INSTEP_BUSY 3

// This process was forked from a process that uses the library, and does not have the library's threads. Nothing has
// changed.
#define INSTEP_FORKED 4

// An integer has no meaning, a text is not UTF-8, a length is wrong, or a struct has a wrong size. Nothing has
// changed.
#define INSTEP_ARGUMENT 5

// An option or hyperparameter is out of range, or two options exclude each other. Nothing has changed.
#define INSTEP_CONFIG 6

// A parameter or tensor is unknown, named twice, missing, of another length, or misaligned. Nothing has changed.
#define INSTEP_LAYOUT 7

// The call is out of order, for example at the wrong point of a pass. Nothing has changed, except that
// instep_stepper_free has freed the stepper.
#define INSTEP_ORDER 8

// This machine, this build, or a part such as the collective does not support the call. Nothing has changed.
#define INSTEP_UNSUPPORTED 9

// The GPU kernels, the GPU's driver or its communication library is missing. Nothing has changed.
#define INSTEP_UNAVAILABLE 10

// A call into the GPU's driver failed.
#define INSTEP_DEVICE 11

// A collective failed, ranks differ, a rank is lost, or the deadline has passed.
#define INSTEP_COLLECTIVE 12

// The self-test of the compiled kernels failed, because they do not round as the library requires. Nothing has
// changed.
#define INSTEP_ARITHMETIC 13

// A checkpoint is damaged, or belongs to another model. The text of instep_last_error says whether anything has
// changed.
#define INSTEP_CHECKPOINT 14

// A file could not be opened, read or written.
#define INSTEP_FILE 15

// An earlier failure ended this stepper or bucket step. The text of instep_last_error names that failure. Free the
// handle.
#define INSTEP_POISONED 16

// The library has a bug that caused a panic in this call or in an earlier call on this handle. Free the handle, and
// report the bug.
#define INSTEP_PANIC 17

// A callback threw a C++ exception, and instep::caught of this header has caught it.
#define INSTEP_THREW 18

// A failure for which this version has no code. The text of instep_last_error describes the failure.
#define INSTEP_OTHER 19

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Copies a tensor to `values`, converted to f32 from its element type. Between passes, any tensor except a released
// gradient can be read. In a pass, only parameters, and gradients that were written in that pass, can be read. `count`
// is the number of elements of the tensor's parameter.
//
// Any thread may call this function, one thread at a time per stepper. The call waits for the last step of the
// tensor's bucket if the tensor is a parameter, a copy, or (in a pass) a gradient. For any other tensor, the call
// waits for all steps.
instep_status instep_stepper_read(instep_stepper *stepper, instep_tensor_id tensor, float *values, size_t count);

// Copies `values` to a tensor, rounded to the tensor's element type. A gradient can be written only in a pass, and any
// other tensor only between passes. A tensor of kind INSTEP_COPY cannot be written, because only steps write it.
// `count` is the number of elements of the tensor's parameter. If one rank writes a parameter, every rank must write
// the same parameter. The next pass then broadcasts rank 0's values of all parameters in the written parameter's
// bucket. States and moving averages are not broadcast, so write them on every rank. Step counts are not written with
// the states: set them on every rank with instep_stepper_set_progress.
//
// Any thread may call this function, one thread at a time per stepper. In a pass, the call waits for the last step of
// the gradient's bucket. Between passes, the call waits for all steps.
instep_status instep_stepper_write(instep_stepper *stepper, instep_tensor_id tensor, const float *values, size_t count);

// Writes a tensor's address to `*out_address`, and its element type to `*out_dtype`. `out_dtype` may be null. 8-bit
// states have no address. `access` is INSTEP_READ or INSTEP_WRITE. In a pass, a call with INSTEP_WRITE marks a
// gradient as written. Until the caller writes the gradient, its memory has the values that the previous pass left
// there.
//
// In a pass, the address is valid until the parameter is handed over or the micro-batch ends. Between passes, the
// address is valid until the next call on this stepper. On a GPU, work that is enqueued on compute_stream while the
// address is valid may use the address. On a GPU, only gradients may be written through an address, and even a call
// with INSTEP_READ marks a gradient as written.
//
// Any thread may call this function, one thread at a time per stepper. On the CPU, a call with INSTEP_READ waits for
// the same steps as instep_stepper_read. A call with INSTEP_WRITE waits for the same steps as instep_stepper_write. On
// a GPU, compute_stream waits instead of the calling thread.
instep_status instep_stepper_address(instep_stepper *stepper,
                                     instep_tensor_id tensor,
                                     uint32_t access,
                                     void **out_address,
                                     uint32_t *out_dtype);

// Gives new addresses to a stepper that was created with the caller's memory. If `tensors` lists no parameters, all
// parameters keep their addresses. If `tensors` lists no buckets, all buckets keep their addresses.
// `*out_has_new_buckets` is 1 if the buckets are new, and 0 if at most addresses have changed. out_has_new_buckets may
// be null. With new buckets, ranks compare layouts, buckets and options. States and step counts stay with their
// parameters. Copy each parameter's values to its new address before this call.
//
// Any thread may call this function between passes, one thread at a time per stepper. On the CPU, the call waits for
// all steps, so the stepper does not touch the old memory after the call. On a GPU, work that is enqueued on
// compute_stream after the call runs after all work that touches the old memory. With new buckets, the call waits for
// all steps on a GPU too.
instep_status instep_stepper_rebind(instep_stepper *stepper, const instep_memory *tensors, uint32_t *out_has_new_buckets);

// Takes part in one pass as a rank that has run out of data. Repeat this call until `*out_goes_on` is 0, which means
// that no rank had data and nothing was stepped. With INSTEP_INPUTS_EVEN the call is refused.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for the pass's
// last sum.
instep_status instep_stepper_join(instep_stepper *stepper, uint32_t *out_goes_on);

// Rebuilds the buckets that the stepper owns, in the order in which rank 0 handed over its gradients. The training's
// results have the same bits with and without this call. `*out_is_rebuilt` is 0 if the buckets already have this
// order. out_is_rebuilt may be null. After this call, addresses that were returned earlier are invalid. If the buckets
// are in the caller's memory, rebuild them yourself and call instep_stepper_rebind.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps,
// and for rank 0 to make this call too.
instep_status instep_stepper_rebuild_buckets(instep_stepper *stepper, uint32_t *out_is_rebuilt);

// Writes only the parameters to a safetensors file for other programs. An existing file at `path` is replaced
// atomically. If `averages` is 1, moving averages are written instead of parameters. If `is_f32` is 1, all values are
// written as f32, and a parameter that has a master is written with the master's values. Only rank 0 writes.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_export(instep_stepper *stepper, const char *path, uint32_t averages, uint32_t is_f32);

// Creates a bucket step. If the call succeeds, it writes the handle to `*out_step`.
//
// Any thread may call this function. No other thread may use the layout during the call. The library starts no thread
// before the first step.
instep_status instep_bucket_step_create(const instep_bucket_step_options *options, instep_bucket_step **out_step);

// Steps the bucket. On the CPU the step is complete when the call returns. On a GPU the call launches the step on
// `stream`. In stream order, the sum of the gradients must come before the step. If the call is refused, nothing is
// written.
//
// If `norm` is not null, call instep_norm_decide on it first. The decision of that call then applies to the step, and
// `scaling` must be null. If `norm` is null, `scaling` gives the numbers by which the step divides the gradients, such
// as the number of ranks. If `norm` and `scaling` are both null, the step uses the gradients as they are.
//
// Any thread may call this function, but only one thread at a time may use the bucket step or the norm. `stream`
// (cudaStream_t or CUstream) must belong to the bucket step's GPU, must stay valid until the step has ended, and must
// not be capturing. A null `stream` means the legacy default stream. For the CPU, pass null.
instep_status instep_bucket_step_step(instep_bucket_step *step,
                                      const instep_tensors *tensors,
                                      const instep_scaling *scaling,
                                      instep_norm *norm,
                                      void *stream);

// Repeats the step of the last call of instep_bucket_step_step that was not refused, on the same tensors, but with
// `scaling` and without a norm. The call does not read or check the list of tensors again, which saves much of the
// time of a small step. The call returns INSTEP_ORDER if no call of instep_bucket_step_step has succeeded since the
// bucket step was created, or since the last call of instep_norm_add for this bucket step. The tensors must still be
// valid and must not overlap.
//
// Any thread may call this function, one thread at a time per bucket step. The function works only on the CPU. On a
// GPU it returns INSTEP_UNSUPPORTED.
instep_status instep_bucket_step_step_again(instep_bucket_step *step, const instep_scaling *scaling);

// Sets the learning rate of a group from the next step on. A null `group` means the group "default". All other
// hyperparameters stay as they are. Use this call for learning-rate schedules.
//
// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
instep_status instep_bucket_step_set_lr(instep_bucket_step *step, const char *group, double lr);

// Sets the given hyperparameters of a group from the next step on. A null `group` means the group "default". If one
// hyperparameter is refused, none is set. Other hyperparameters stay as they are. The new hyperparameters must need
// the same states as the hyperparameters at creation.
//
// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
instep_status instep_bucket_step_set_hyper(instep_bucket_step *step,
                                           const char *group,
                                           const instep_hyper *hypers,
                                           size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next step on. A null `group` means the group "default".
// Hyperparameters that you leave out get their defaults, even if they were set before. To change only some
// hyperparameters, call instep_bucket_step_set_lr or instep_bucket_step_set_hyper. The new optimizer must have the
// same name and the same states as the old one. Step counts and states do not change.
//
// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
instep_status instep_bucket_step_set_optimizer(instep_bucket_step *step,
                                               const char *group,
                                               const instep_optimizer *optimizer);

// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
// optimizers, `*out_carried` is 1. Either pointer may be null.
//
// Any thread may call this function, one thread at a time per bucket step. On a GPU, the call may wait for the last
// step.
instep_status instep_bucket_step_progress(instep_bucket_step *step,
                                          uint32_t param,
                                          uint64_t *out_count,
                                          double *out_carried);

// Resumes a training: sets the numbers that instep_bucket_step_progress reads. For NAdam with a count above 0,
// `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63 or more is refused.
//
// Any thread may call this function, one thread at a time per bucket step. On a GPU, the call may wait for the last
// step.
instep_status instep_bucket_step_set_progress(instep_bucket_step *step, uint32_t param, uint64_t count, double carried);

// Adds the summed gradients of a bucket to a norm. Add each bucket once between instep_norm_begin and
// instep_norm_decide, in any order. The norm leaves out parameters that have no gradient. A bucket without any
// gradient still counts as added.
//
// Any thread may call this function, but only one thread at a time may use the norm or the bucket step. The gradients
// are only read.
instep_status instep_norm_add(instep_norm *norm, instep_bucket_step *step, const instep_tensor *grads, void *stream);

// Frees a bucket step. If the handle is null, the call does nothing.
//
// Any thread may call this function, one thread at a time per bucket step. If another thread is using the bucket step,
// the call returns INSTEP_BUSY and does not free the bucket step. On a GPU, the call waits for the last step, but only
// for up to 20 ms. After 20 ms, the memory that the step may still use is leaked.
instep_status instep_bucket_step_free(instep_bucket_step *step);

// Saves parameters, states, step counts and `scalars` to a file, which is replaced atomically. Only rank 0 writes. On
// any other rank the call does nothing and returns at once. `scalars` may be null if `scalar_count` is 0.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_save(instep_stepper *stepper,
                                  const char *path,
                                  const instep_scalar *scalars,
                                  size_t scalar_count);

// Loads a checkpoint into a stepper of the same parameters and optimizers, and sets the values of `scalars` from the
// checkpoint. Every rank loads the same file. Nothing changes before the whole file has been checked.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_load(instep_stepper *stepper, const char *path, instep_scalar *scalars, size_t scalar_count);

// Returns the version of the library, such as "0.1.0". The text lives as long as the process.
//
// Any thread may call this function at any time, also in callbacks and in forked children.
const char *instep_version(void);

// Returns the name of a status, such as "INSTEP_OK". The text lives as long as the process.
//
// Any thread may call this function at any time, also in callbacks and in forked children.
const char *instep_status_name(instep_status status);

// Returns the error of the last failed call on the calling thread: `<thing>: <what is wrong>; <what to do>`. The text
// is empty if no call has failed. The library owns the text. The text is valid until another call on this thread
// fails.
//
// Any thread may call this function at any time, also in callbacks and in forked children.
const char *instep_last_error(void);

// Creates a layout without parameters. If the call succeeds, it writes the handle to `*out_layout`.
//
// Any thread may call this function.
instep_status instep_layout_create(instep_layout **out_layout);

// Adds a parameter and writes its number to `*out_param`: 0, 1, 2 and so on. `out_param` may be null. Add parameters
// in the order in which the forward pass uses them. The first use of the layout closes it. Once the layout is closed,
// this call returns INSTEP_ORDER.
//
// Any thread may call this function, one thread at a time per layout. The struct is copied. If a name is used twice,
// or a shape is too large, the first use of the layout fails.
instep_status instep_layout_add(instep_layout *layout, const instep_param *param, uint32_t *out_param);

// Finds the number of a parameter by its name. If no parameter has the name, the call returns INSTEP_LAYOUT, and
// instep_last_error lists similar names. This call closes the layout.
//
// Any thread may call this function, one thread at a time per layout.
instep_status instep_layout_find(instep_layout *layout, const char *name, uint32_t *out_param);

// Frees a layout. If the handle is null, the call does nothing.
//
// Any thread may call this function, one thread at a time per layout. If another thread is using the layout, the call
// returns INSTEP_BUSY and does not free the layout.
instep_status instep_layout_free(instep_layout *layout);

// Creates a norm for buckets on a GPU, or on the CPU if `on` is null. If the call succeeds, it writes the handle to
// `*out_norm`.
//
// Any thread may call this function.
instep_status instep_norm_create(const instep_cuda *on, instep_norm **out_norm);

// Begins a new norm. `scaling` gives the numbers by which the norm and its steps divide the gradients, such as the
// number of ranks. If `scaling` is null, they do not divide the gradients. A clip in `scaling` is refused, because the
// norm decides the clip.
//
// Any thread may call this function, one thread at a time per norm. On a GPU, the work of each call on a norm is
// enqueued on the `stream` of that call. This work runs after the work of the previous call on this norm, even if the
// two calls have different streams. `stream` must meet the conditions that instep_bucket_step_step names.
instep_status instep_norm_begin(instep_norm *norm, const instep_scaling *scaling, void *stream);

// Decides the clip coefficient, and whether the steps are skipped. Gradients with a norm above `max_norm` are clipped
// to `max_norm`. If `max_norm` is 0, nothing is clipped. If `skip_nonfinite` is 1 and a gradient is infinite or NaN,
// all steps are skipped. After this call, step each added bucket once with this norm. The call is refused if no bucket
// was added.
//
// Any thread may call this function, one thread at a time per norm.
instep_status instep_norm_decide(instep_norm *norm, double max_norm, uint32_t skip_nonfinite, void *stream);

// Reads the decision.
//
// Any thread may call this function, one thread at a time per norm. On a GPU, the call waits for the work of the last
// call on this norm.
instep_status instep_norm_read(instep_norm *norm, instep_decision *out_decision);

// Frees a norm. If the handle is null, the call does nothing.
//
// Any thread may call this function, one thread at a time per norm. If another thread is using the norm, the call
// returns INSTEP_BUSY and does not free the norm.
instep_status instep_norm_free(instep_norm *norm);

// Writes the name of one of the optimizer's states to `*out_name`. `index` counts the states from 0. The names are
// those of torch.optim. If there is no state with this index, the call writes null. The text lives as long as the
// process. In instep_tensors, the states are in the order of `index`. Checkpoints use the same names.
//
// Any thread may call this function.
instep_status instep_optimizer_state_name(const instep_optimizer *optimizer, size_t index, const char **out_name);

// Opens a pass: one forward and backward. A `micro_batches` of 0 or 1 means one micro-batch. With several
// micro-batches, the caller writes a gradient in the first micro-batch and adds to it in later ones. Buckets are
// stepped in the last micro-batch. The first pass broadcasts rank 0's parameters. If a parameter is written later
// (instep_stepper_write, or instep_stepper_address with INSTEP_WRITE), the next pass broadcasts all parameters of the
// parameter's bucket. With sums_by_caller, no pass broadcasts parameters.
//
// Any thread may call this function, one thread at a time per stepper. On a GPU, the call waits only if it is eight
// passes ahead of the GPU. On the CPU, the call waits only if the option `is_inline` is 1: if the pass broadcasts
// parameters, the call then waits for the broadcast.
instep_status instep_stepper_begin(instep_stepper *stepper, uint32_t micro_batches);

// Begins the next micro-batch. The caller may then use every parameter and gradient again. The values of the gradients
// do not change.
//
// Any thread may call this function, one thread at a time per stepper. The call does not wait.
instep_status instep_stepper_next_micro_batch(instep_stepper *stepper);

// Hands over a parameter. The caller declares that the gradient of the parameter is written, and that one use of the
// parameter is finished. Once all parameters of the bucket are handed over in the last micro-batch, the bucket is
// reduced. With a collective of several ranks, the reduce also requires that all earlier buckets are handed over. The
// option `mode` decides when the bucket is stepped. When the parameter is handed over for its last use, its address
// and its gradient's address become invalid.
//
// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
// is 1. On a GPU, the sum and the step run after the work that is on compute_stream at the time of the call.
instep_status instep_stepper_grad_ready(instep_stepper *stepper, uint32_t param);

// Hands over all parameters of a bucket. Buckets in the caller's memory are numbered in the order of
// instep_memory.buckets. With sums_by_caller, the call also declares that the bucket's sum is complete. On a GPU with
// sums_by_caller, call instep_stepper_bucket_ready_after instead.
//
// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
// is 1.
instep_status instep_stepper_bucket_ready(instep_stepper *stepper, uint32_t bucket);

// Hands over all parameters of a bucket on a GPU with sums_by_caller. The bucket's step waits for `event` (cudaEvent_t
// or CUevent). The caller must have recorded the event in this pass, after the bucket's sum. The sum must run after
// the pass's last write of a gradient in the bucket, and after the pass's last read of a parameter in the bucket. If
// the event was never recorded, or was recorded too early, the step races with the sum. This call enqueues the wait,
// so the event may be destroyed or recorded again after the call.
//
// Any thread may call this function, one thread at a time per stepper. The call does not wait.
instep_status instep_stepper_bucket_ready_after(instep_stepper *stepper, uint32_t bucket, void *event);

// Declares parameters for which no rank has a gradient, so that the open pass does not step them. All ranks must
// declare the same parameters at the same point of the pass, before these parameters are handed over. If the gradient
// of a declared parameter was written, it is discarded. With INSTEP_UNUSED_SKIP the call is refused, because the
// stepper then finds unused parameters itself.
//
// Any thread may call this function, one thread at a time per stepper. The call does not wait.
instep_status instep_stepper_set_unused(instep_stepper *stepper, const uint32_t *params, size_t param_count);

// Closes the pass. The call hands over each parameter that has a written gradient and was not handed over before. The
// option `unused` decides what happens to parameters without a gradient. With sums_by_caller, the call returns
// INSTEP_ORDER if gradients of a bucket were written but the bucket was not handed over. Only the hand-over declares
// that the bucket's sum is complete. After INSTEP_ORDER the pass is still open, and can be completed or abandoned.
//
// Any thread may call this function, one thread at a time per stepper. The call waits only if the option `is_inline`
// is 1. Otherwise steps overlap with later work, and the next access to a tensor waits for the step of the tensor's
// bucket.
instep_status instep_stepper_finish(instep_stepper *stepper);

// Abandons the pass. A bucket is launched when its sum and its step are enqueued on the device. The gradients of
// buckets that were not launched are discarded. In INSTEP_MODE_EAGER, the steps of launched buckets are not undone.
// The call writes the number of stepped buckets to `*out_count`, and the first `capacity` of their numbers to
// `out_buckets`. Both pointers may be null.
//
// Any thread may call this function, one thread at a time per stepper. The call waits only if the pass broadcasts
// parameters. All ranks must abandon the pass after the same bucket.
instep_status instep_stepper_abandon(instep_stepper *stepper, uint32_t *out_buckets, size_t capacity, size_t *out_count);

// Sets the learning rate of a group from the next pass on. A null `group` means the group "default". All other
// hyperparameters stay as they are. All ranks must set the same value. Use this call for learning-rate schedules.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
// steps, except after an abandoned pass.
instep_status instep_stepper_set_lr(instep_stepper *stepper, const char *group, double lr);

// Sets the given hyperparameters of a group from the next pass on. A null `group` means the group "default". If one
// hyperparameter is refused, none is set. Other hyperparameters stay as they are. All ranks must set the same values.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
// steps, except after an abandoned pass.
instep_status instep_stepper_set_hyper(instep_stepper *stepper,
                                       const char *group,
                                       const instep_hyper *hypers,
                                       size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next pass on. A null `group` means the group "default".
// Hyperparameters that you leave out get their defaults, even if they were set before. To change only some
// hyperparameters, call instep_stepper_set_lr or instep_stepper_set_hyper. The new optimizer must have the same name
// as the old one. All ranks must set the same values.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
// steps, except after an abandoned pass.
instep_status instep_stepper_set_optimizer(instep_stepper *stepper, const char *group, const instep_optimizer *optimizer);

// Freezes a parameter from the next pass on, or unfreezes it. The gradient of a frozen parameter cannot be written,
// and the parameter is not stepped. All ranks must freeze the same parameters.
//
// Any thread may call this function between passes, one thread at a time per stepper. If `is_frozen` is 1, the call
// waits for the last step of the parameter's bucket.
instep_status instep_stepper_set_frozen(instep_stepper *stepper, uint32_t param, uint32_t is_frozen);

// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
// optimizers, `*out_carried` is 1. Either pointer may be null.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_progress(instep_stepper *stepper, uint32_t param, uint64_t *out_count, double *out_carried);

// Resumes a training without a checkpoint of this library: sets the numbers that instep_stepper_progress reads. For
// NAdam with a count above 0, `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63
// or more is refused. All ranks must set the same values.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_set_progress(instep_stepper *stepper, uint32_t param, uint64_t count, double carried);

// Reads the loss scale of the open pass, or, between passes, the scale of the next pass.
//
// Any thread may call this function, one thread at a time per stepper. With the option loss_scaler, the call waits for
// the decision of the previous pass, so make the call only after forward.
instep_status instep_stepper_loss_scale(instep_stepper *stepper, double *out_loss_scale);

// Reads a norm of the last pass's averaged gradients that belongs to a group, and whether this norm is known. A null
// `group` means the group "default". If the group is clipped alone, the norm covers only this group. If the group is
// not clipped, the norm covers all groups that are not clipped. For any other group, the norm is the one in
// instep_pass_status. The norm is unknown while instep_pass_status has no norm, and from
// instep_stepper_rebuild_buckets until the next pass.
//
// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
instep_status instep_stepper_group_norm(instep_stepper *stepper,
                                        const char *group,
                                        double *out_norm,
                                        uint32_t *out_has_norm);

// Reads the decisions about a pass. If `waits` is 1, the call reads the decisions about the last pass. If `waits` is
// 0, the call reads the decisions about the newest pass that is known to have ended.
//
// Any thread may call this function, one thread at a time per stepper. If `waits` is 1, the call is allowed only
// between passes, and waits for all steps. If `waits` is 0, the call never waits.
instep_status instep_stepper_status(instep_stepper *stepper, uint32_t waits, instep_pass_status *out_status);

// Creates a stepper. If the call succeeds, it writes the handle to `*out_stepper`.
//
// Any thread may call this function. No other thread may use the layout during the call. The library starts its
// threads at the first pass.
instep_status instep_stepper_create(const instep_stepper_options *options, instep_stepper **out_stepper);

// Waits for all steps, frees the stepper, and reports failures. If the call returns INSTEP_BUSY, INSTEP_HANDLE or
// INSTEP_FORKED, nothing is freed. If the call returns INSTEP_ORDER, a pass was open: the stepper is freed, and the
// other ranks' steppers end with an error. If the handle is null, the call does nothing.
//
// Any thread may call this function, one thread at a time per stepper. If a queued sum needs other ranks, the call
// waits for them up to the deadline.
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
