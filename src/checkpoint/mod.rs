//! Saving a training and going on with it, bit for bit, in one file that is there as a whole or not at all.
//!
//! A checkpoint is a safetensors file that any reader of that format opens. Nothing in it depends on buckets, mode,
//! rank count or instruction set: it goes into any stepper whose parameters have the same names and lengths and whose
//! optimizer keeps the same states.
//!
//! Values are F32 for every [precision](crate::Precision) of the stepper. F32 holds the value of a master weight, a
//! remainder, a bf16 or an 8-bit code exactly. In a stepper of the same precision the run goes on bit for bit,
//! stochastic rounding included; one of another precision goes on from the same values, rounded to the nearest where it
//! has fewer bits (in f16, what is beyond 65504 becomes infinite).
//!
//! | Tensor | Type | What it is |
//! |---|---|---|
//! | `param.NAME` | F32, of the parameter's [shape](crate::LayoutBuilder::shape) | its value; any shape of as many elements is read |
//! | `state.NAME.STATE` | the same | an optimizer state, as `torch.optim` calls it (`exp_avg`, ...) |
//! | `ema.NAME` | the same | its [moving average](crate::StepperBuilder::ema), if they are kept |
//! | `state.NAME.step` | U64 scalar | how many updates the parameter has had |
//! | `state.NAME.mu_product` | F64 scalar | what NAdam [carries](Stepper::carried) beside that |
//! | `scaler.scale`, `scaler.growth_tracker` | F64, U64 scalars | where [dynamic loss scaling](crate::LossScaler) stands, if there is any |
//! | `schedule.step` | U64 scalar | where [learning-rate schedules](crate::LrSchedule) stand |
//! | `clip.previous_norm` | F64 scalar | the norm to clip by with [`Clip::Previous`](crate::Clip::Previous), once there is one |
//! | any other name | F64 or U64 scalar | [`Extras::scalars`]; so are a scaler's state and a norm to clip by, if the stepper has no use for them |
//! | `crc32` | U32, last in the file | CRC-32 (as zlib) of length and header, then of each tensor with data, in order |
//!
//! Names of parameters may have dots in them, names of states have none, so a key is split at its last dot. The file
//! holds neither gradients nor settings of the trainer (hyperparameters, learning rates, frozen parameters): a stepper
//! that loads keeps its own, and a run that has [changed](Stepper::set_hyper) them sets them again. Moving
//! averages that the stepper keeps and the file has not begin as the loaded parameters; those that the file has and the
//! stepper does not keep are refused. [Copies](crate::StepperBuilder::copy_params) are not saved: until a parameter's
//! next update, its copy is what it was before the load. [`export`] writes the parameters alone, in their own types.
//!
//! ```
//! use instep::checkpoint::{self, Extras, Scalar};
//! # use instep::{AdamW, Layout, Solo, Stepper};
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("last.safetensors");
//! # let layout = Layout::builder().param("w", 2).build()?;
//! # let w = layout.id("w")?;
//! # let mut stepper = Stepper::host(&layout, AdamW::default(), Solo::default())?;
//! # stepper.write(w, &[3.0, 4.0])?;
//! # stepper.set_step_count(w, 7)?;
//! let mut extras = Extras::default();
//! extras.scalars.insert("epoch".into(), Scalar::U64(12));
//! checkpoint::save_with(&stepper, &extras, &path)?; // on every rank: only rank 0 writes
//!
//! let mut stepper = Stepper::builder(&layout, AdamW::default()).bucket_cap_bytes(4096).host(Solo::default())?;
//! let extras = checkpoint::load(&mut stepper, &path)?; // on every rank: each reads the same file
//! assert_eq!(extras.scalars["epoch"], Scalar::U64(12));
//! assert_eq!((stepper.view::<f32>(w)?, stepper.step_count(w)?), (&[3.0, 4.0][..], 7));
//! # Ok::<(), instep::Error>(())
//! ```
//!
//! # Source
//! The flattened form of `torch.distributed.checkpoint`'s optimizer state dict, and
//! <https://huggingface.co/docs/safetensors>. Replacing a file by renaming: Pillai et al., OSDI 2014, "All File Systems
//! Are Not Created Equal".

mod extras;
mod file;
mod keys;
mod partial;
mod patient;
mod plain;
mod plan;
mod restore;
#[doc(hidden)]
pub mod safetensors;
mod together;
mod torch;
mod verified;
mod write;

pub use extras::{Extras, Scalar};
#[doc(hidden)]
pub use file::replace;
#[doc(hidden)]
pub use keys::{CHECKSUMS, VERSION_KEY};
pub use plain::{Export, export, import_params};
pub use together::{save_together, save_together_with};

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;

use crate::device::Device;
use crate::error::Result;
use crate::stepper::Stepper;
use patient::Patient;
use plan::Plan;
use restore::restore;
use safetensors::{Data, Header, inside};

/// Saves to a file, which is replaced as a whole or left as it was. **Only rank 0 writes**; other ranks return at once,
/// so every rank may call it. With [shards](crate::Strategy) all ranks must call it. Each sends rank 0 its shards, or
/// writes them itself with [`save_together`]. The file is the same as without shards. Ranks whose models differ each
/// call [`write()`] instead. [`save_with`] saves numbers of the trainer's own beside it.
///
/// The data go into a file of their own in the same folder (a hidden one that ends in `.instep-partial`), which is
/// flushed to disk and renamed, and then the folder is flushed. A file that a killed run has left is never read. It is
/// removed by the next save to the same path, or by one into the same folder a day later. Two processes must not save
/// to one path at a time: either save may win and the other may fail.
///
/// # Ordering
/// Waits for all steps. Allocates space for one tensor.
///
/// # Errors
/// `Order` inside a pass, `Poisoned` after a failure, `Checkpoint` if the path is no regular file, or there are more names
/// than the format can hold. `File` if the file cannot be written; if it says that the folder cannot be flushed, the new
/// file is there, whole, but may not outlive a power failure.
pub fn save<D: Device>(stepper: &Stepper<D>, path: impl AsRef<Path>) -> Result<()> {
    save_with(stepper, &Extras::default(), path)
}

/// Saves to a file, as [`save`] does, with scalars and texts of the trainer's own beside the stepper. Those of rank 0 count.
///
/// # Ordering
/// Ordering as for [`save`].
///
/// # Errors
/// Errors as for [`save`]; `Config` for a name in `extras` that the checkpoint uses itself.
pub fn save_with<D: Device>(stepper: &Stepper<D>, extras: &Extras, path: impl AsRef<Path>) -> Result<()> {
    save_file(stepper, path.as_ref(), |out| write_with(stepper, extras, out))
}

/// Writes a file on rank 0. With shards, the other ranks send theirs and write nothing.
fn save_file<D: Device>(
    stepper: &Stepper<D>,
    path: &Path,
    write: impl Fn(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let is_shared = stepper.plan().is_sharded();
    if stepper.rank() != 0 {
        return if is_shared { write(&mut std::io::sink()) } else { Ok(()) };
    }
    let mut has_gathered = false;
    let outcome = replace(path, |file| {
        has_gathered = true;
        write(&mut Patient::new(file, is_shared))
    });
    if is_shared && !has_gathered {
        // The other ranks wait for this one's parts all the same. The file's error is the one to report.
        let _ = write(&mut std::io::sink());
    }
    outcome
}

/// Writes a checkpoint to any writer, on any rank, front to back. With [shards](crate::Strategy) all ranks call it
/// together.
///
/// ```
/// # use instep::{checkpoint, Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 2).build()?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut bytes = Vec::new();
/// checkpoint::write(&stepper, &mut bytes)?;
/// checkpoint::read(&mut stepper, std::io::Cursor::new(bytes))?;
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// Ordering as for [`save`].
///
/// # Errors
/// Errors as for [`save`]; `File` if `out` refuses, which may have taken some of it.
pub fn write<D: Device>(stepper: &Stepper<D>, out: impl Write) -> Result<()> {
    write_with(stepper, &Extras::default(), out)
}

/// Writes a checkpoint to any writer, as [`write()`] does, with scalars and texts of the trainer's own.
///
/// # Ordering
/// Ordering as for [`save`].
///
/// # Errors
/// Errors as for [`save`]; `File` if `out` refuses, which may have taken some of it; `Config` for a name in `extras`
/// that the checkpoint uses itself.
pub fn write_with<D: Device>(stepper: &Stepper<D>, extras: &Extras, out: impl Write) -> Result<()> {
    write::write(stepper, extras, out)
}

/// Loads a checkpoint: parameters, states and step counts into the stepper, the rest to the caller. Every rank loads
/// the same file, always, since states are never broadcast; if one did not, the next collective is a `Mismatch`, if it
/// [compares](Stepper::set_lr). The next pass gives every rank the parameters of rank 0, in a collective.
///
/// The file is read twice: once to check all of it, then to load it, tensor by tensor, each checked again before it is
/// written. Nothing in the stepper changes before the whole file has been found good.
///
/// # Ordering
/// Waits for all steps. Allocates space for one tensor and the names.
///
/// # Errors
/// `Checkpoint` if a byte of the file is not what was written, a tensor is missing or belongs nowhere, or one has
/// another length or type; `File` if it cannot be read; `Order` inside a pass, `Poisoned` after a failure: nothing has
/// changed then. `PartlyLoaded` if the file changed or could not be read any more on the second reading.
pub fn load<D: Device>(stepper: &mut Stepper<D>, path: impl AsRef<Path>) -> Result<Extras> {
    let path = path.as_ref();
    let loaded = safetensors::regular_file(path)?;
    read(stepper, loaded).map_err(|error| inside(path, error))
}

/// Loads a checkpoint from anything that can be read twice.
///
/// # Ordering
/// Ordering as for [`load`].
///
/// # Errors
/// Errors as for [`load`].
pub fn read<D: Device>(stepper: &mut Stepper<D>, source: impl Read + Seek) -> Result<Extras> {
    restore(stepper, source, true, |header, stepper| Plan::exact(header, stepper))
}

/// Takes over a state of `torch.optim` from a safetensors file, without a checksum:
///
/// ```python
/// from safetensors.torch import save_file
/// names = {id(p): name for name, p in model.named_parameters()}
/// tensors = {f"param.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
/// tensors |= {f"state.{names[id(p)]}.{state}": torch.as_tensor(value).contiguous()
///             for p, states in optimizer.state.items() for state, value in states.items() if value is not None}
/// save_file(tensors, "from_torch.safetensors")
/// ```
///
/// ```
/// # use instep::{checkpoint, Adam, Layout, Solo, Stepper};
/// # use instep::checkpoint::safetensors::{Dtype, Entry, header};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("from_torch.safetensors");
/// # let entry = |name: &str, dtype, shape: &[u64]| Entry { name: name.into(), dtype, shape: shape.to_vec() };
/// # let entries = [entry("param.w", Dtype::F32, &[1, 2]), entry("state.0.exp_avg", Dtype::Bf16, &[1, 2]),
/// #     entry("state.0.exp_avg_sq", Dtype::F32, &[1, 2]), entry("state.0.step", Dtype::F32, &[])];
/// # let mut bytes = header(&entries, &Default::default())?;
/// # bytes.extend([3f32, 4.0].iter().flat_map(|x| x.to_le_bytes()));
/// # bytes.extend([0x80, 0x3f, 0, 0]);
/// # bytes.extend([1f32, 0.0, 9.0].iter().flat_map(|x| x.to_le_bytes()));
/// # std::fs::write(&path, bytes).unwrap();
/// let layout = Layout::builder().param("w", 2).build()?;
/// let mut stepper = Stepper::host(&layout, Adam::default(), Solo::default())?;
/// checkpoint::import(&mut stepper, std::fs::File::open(&path).unwrap(), None)?;
/// let w = layout.id("w")?;
/// assert_eq!(stepper.step_count(w)?, 9);
/// assert_eq!(stepper.view::<f32>(w.state("exp_avg"))?, [1.0, 0.0]);
/// # Ok::<(), instep::Error>(())
/// ```
///
/// Of PyTorch's FSDP, whose ranks keep rows of each parameter or parts of flat ones, torch joins the shards under these keys:
///
/// ```python
/// whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
/// params = get_model_state_dict(model, options=whole)  # on all ranks, rank 0 saves
/// states = get_optimizer_state_dict(model, optimizer, options=whole)
/// tensors = {f"param.{name}": p.clone() for name, p in params.items()}
/// tensors |= {name: value.clone() for name, value in states.items() if name.startswith("state.")}
/// ```
///
/// A state's key has the parameter's name, or its number in torch's `state_dict`: its place in `order`, a list of
/// names, or if there is none in the order of registration. torch numbers group by group, so with several groups pass
/// `order`: lengths that happen to agree would hide a mistake. A name wins where it reads like a number. Parameters are
/// optional; moving averages are all there or none is. A parameter without any state is one that has had no update, as
/// torch has it; otherwise all states that its group keeps must be there, and `step`, but for a momentum buffer, which
/// torch saves without one. Values may be F32, F16 or BF16, or F64 that are exactly an f32; `step` is a whole number of
/// any type, of one element; NAdam's `mu_product`, F32 or F64, comes with it. A checkpoint of this library can be
/// imported too, and its checksums are held to it.
///
/// # Ordering
/// Ordering as for [`load`], which says what ranks must do, too.
///
/// # Errors
/// Errors as for [`load`]; `Layout` if `order` names what is no parameter.
pub fn import<D: Device>(
    stepper: &mut Stepper<D>,
    source: impl Read + Seek,
    order: Option<&[&str]>,
) -> Result<Extras> {
    restore(stepper, source, false, |header, stepper| torch::sort(header, stepper, order))
}

/// Opens a tensor file for `instep diff`. A checkpoint is read to its end and held to its checksums.
///
/// # Errors
/// `Checkpoint` if the file is broken or a checksum differs, `File` if it cannot be read; both name the path.
#[doc(hidden)]
pub fn open_checked(path: &Path) -> Result<(Header, Data<File>)> {
    restore::open_checked(safetensors::regular_file(path)?).map_err(|error| inside(path, error))
}
