//! Saves the state of a training in one file, and loads such a file. The resumed training has the same bits as an
//! uninterrupted training. A save never leaves an incomplete file at its path.
//!
//! A checkpoint is a safetensors file, and any reader of that format can open it. The contents of a checkpoint do not
//! depend on the buckets, the mode, the number of ranks or the instruction set. Any stepper can load the checkpoint if
//! its parameters have the same names and lengths, and if its optimizer has states of the same names.
//!
//! Values are F32 for every [precision](crate::Precision) of the stepper. F32 represents the value of a master weight,
//! a remainder, a bf16 or an 8-bit code exactly. A stepper of the same precision resumes bit for bit, even with
//! stochastic rounding. A stepper of another precision resumes from the same values. If a type of the loading stepper
//! has fewer bits than a value needs, the value is rounded to nearest (in f16, a value beyond 65504 becomes infinite).
//!
//! | Tensor | Type | What it is |
//! |---|---|---|
//! | `param.NAME` | F32, of the parameter's [shape](crate::LayoutBuilder::shape) | the parameter's value; a load accepts any shape with the same number of elements |
//! | `state.NAME.STATE` | the same | an optimizer state, under its name in `torch.optim` (`exp_avg`, ...) |
//! | `ema.NAME` | the same | the parameter's [moving average](crate::StepperBuilder::ema), if the stepper keeps averages |
//! | `state.NAME.step` | U64 scalar | the parameter's number of updates |
//! | `state.NAME.mu_product` | F64 scalar | the number that NAdam [carries](Stepper::carried) besides the step count |
//! | `scaler.scale`, `scaler.growth_tracker` | F64, U64 scalars | the state of [dynamic loss scaling](crate::LossScaler), if there is any |
//! | `schedule.step` | U64 scalar | the step number of [learning-rate schedules](crate::LrSchedule) |
//! | `clip.previous_norm` | F64 scalar | the norm by which [`Clip::Previous`](crate::Clip::Previous) clips next, if there is one yet |
//! | any other name | F64 or U64 scalar | a scalar of [`Extras::scalars`]; a load adds the loss scaler's state and the previous norm to these scalars if the stepper does not use them |
//! | `crc32` | U32, last in the file | the CRC-32 (as in zlib) of the header and its length, then the CRC-32 of each tensor with data, in the order of the file |
//!
//! A parameter's name may have dots, but a state's name has none. A key is therefore split at its last dot. The file
//! has no gradients and no settings of the trainer (hyperparameters, learning rates, frozen parameters). A stepper that
//! loads a file keeps its own settings. If a run has [changed](Stepper::set_hyper) its settings, set them again after a
//! load. If the stepper keeps moving averages and the file has none, the load sets the averages to the loaded
//! parameters. If the file has averages and the stepper keeps none, the load is refused.
//! [Copies](crate::StepperBuilder::copy_params) are not saved. A load does not change a parameter's copy. The next
//! update writes the copy. [`export`] writes only the parameters, in their own types.
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
mod late_errors;
mod partial;
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
use late_errors::LateErrors;
use plan::Plan;
use restore::restore;
use safetensors::{Data, Header, inside};

/// Saves a checkpoint to the file at `path`. An existing file is replaced atomically. **Only rank 0 writes**. Without
/// [shards](crate::Strategy), the other ranks may also make this call, which then returns at once. With shards, all
/// ranks must make this call, and each rank sends its shards to rank 0. (With [`save_together`], each rank writes its
/// own shards.) A sharded stepper writes the same bytes as a stepper without shards. If ranks have different models,
/// each rank calls [`write()`] instead. [`save_with`] also saves the trainer's own scalars and texts.
///
/// The data are written to a hidden file in the same folder, with a name that ends in `.instep-partial`. The file is
/// flushed to disk and renamed, and then the folder is flushed. A hidden file that remains after a killed run is never
/// read. The next save to the same path removes that hidden file. After a day, any save into the same folder also
/// removes it. Two processes must not save to one path at the same time. Otherwise one save may fail, and the
/// checkpoint may be that of either process.
///
/// # Ordering
/// Waits for all steps. Allocates space for one tensor.
///
/// # Errors
/// `Order` inside a pass. `Poisoned` after a failure. `Checkpoint` if the path is not a regular file, or if the file's
/// header would be too long for the format. `File` if the file cannot be written. If the error says that the folder
/// cannot be flushed, the new file is complete, but a power failure may lose it.
pub fn save<D: Device>(stepper: &Stepper<D>, path: impl AsRef<Path>) -> Result<()> {
    save_with(stepper, &Extras::default(), path)
}

/// Does the same as [`save`], and also saves the trainer's own scalars and texts. Only the scalars and texts of rank 0
/// are saved.
///
/// # Ordering
/// Ordering as for [`save`].
///
/// # Errors
/// Errors as for [`save`]. `Config` for a name in `extras` that the checkpoint uses itself.
pub fn save_with<D: Device>(stepper: &Stepper<D>, extras: &Extras, path: impl AsRef<Path>) -> Result<()> {
    save_file(stepper, path.as_ref(), |out| write_with(stepper, extras, out))
}

/// Writes a file on rank 0. With shards, the other ranks send their shards to rank 0 and write nothing.
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
        write(&mut LateErrors::new(file, is_shared))
    });
    if is_shared && !has_gathered {
        // The other ranks wait for this rank's parts, so this rank sends them even after an error. Only the error of
        // the file is reported.
        let _ = write(&mut std::io::sink());
    }
    outcome
}

/// Writes a checkpoint to any writer, from front to back, on any rank. With [shards](crate::Strategy), all ranks must
/// make this call.
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
/// Errors as for [`save`]. `File` if `out` returns an error. In this case, `out` may have received part of the data.
pub fn write<D: Device>(stepper: &Stepper<D>, out: impl Write) -> Result<()> {
    write_with(stepper, &Extras::default(), out)
}

/// Does the same as [`write()`], and also writes the trainer's own scalars and texts.
///
/// # Ordering
/// Ordering as for [`save`].
///
/// # Errors
/// Errors as for [`save`]. `File` if `out` returns an error. In this case, `out` may have received part of the data.
/// `Config` for a name in `extras` that the checkpoint uses itself.
pub fn write_with<D: Device>(stepper: &Stepper<D>, extras: &Extras, out: impl Write) -> Result<()> {
    write::write(stepper, extras, out)
}

/// Loads a checkpoint into a stepper: parameters, states, moving averages, step counts and the stepper's own scalars.
/// Returns the other scalars and the texts. Every rank must load the same file, because states are never broadcast. If
/// a rank loaded no file, or a file with other step counts, the next collective that [compares
/// calls](Stepper::set_lr) returns `Mismatch`. Ranks do not compare the loaded states. The next pass broadcasts the
/// parameters of rank 0.
///
/// The file is read twice: first to check all of it, then to load it tensor by tensor. The second reading checks each
/// tensor again before it writes the tensor to the stepper. Nothing in the stepper changes before the whole file has
/// been checked.
///
/// # Ordering
/// Waits for all steps. Allocates memory for one tensor and for the names of all tensors.
///
/// # Errors
/// `Checkpoint` if a byte of the file has changed since the file was written, or if a tensor is missing, is unknown, or
/// has another length or type. `File` if the file cannot be read. `Order` inside a pass. `Poisoned` after a failure.
/// After these errors, nothing has changed. `PartlyLoaded` if the second reading fails, or finds that the file has
/// changed, after a tensor was loaded.
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

/// Loads the state of a `torch.optim` optimizer from a safetensors file. The file needs no checksums. The following
/// Python code writes such a file:
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
/// With PyTorch's FSDP, each rank has rows of each parameter, or parts of flat parameters. With the following code,
/// PyTorch joins the shards:
///
/// ```python
/// whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
/// params = get_model_state_dict(model, options=whole)  # on all ranks, rank 0 saves
/// states = get_optimizer_state_dict(model, optimizer, options=whole)
/// tensors = {f"param.{name}": p.clone() for name, p in params.items()}
/// tensors |= {name: value.clone() for name, value in states.items() if name.startswith("state.")}
/// ```
///
/// The key of a state contains the parameter's name, or the parameter's number in torch's `state_dict`. The number is
/// an index into `order`, a list of parameter names. Without `order`, the number is the parameter's index in the
/// layout. Pass `order` if there are several groups, because torch numbers parameters group by group. The import cannot
/// detect a wrong order of parameters that have the same length. A number that is also the name of a parameter counts
/// as a name. The file may have all parameters or none, and all moving averages or none. As in torch, a parameter
/// without any state has had no update. For any other parameter, the file must have all states that the parameter's
/// group uses, and `step`. If the only state is a momentum buffer, `step` is not needed, because torch saves no `step`
/// with a momentum buffer. Values may be F32, F16 or BF16. F64 is accepted if f32 represents every value exactly.
/// `step` is one whole number (F32, F64, I64 or U64). NAdam also needs `mu_product` (F32 or F64). A checkpoint of this
/// library can be imported too, and its checksums are verified.
///
/// # Ordering
/// Ordering as for [`load`]. With several ranks, the rules of `load` apply.
///
/// # Errors
/// Errors as for [`load`]. `Layout` if `order` has a name that no parameter has.
pub fn import<D: Device>(
    stepper: &mut Stepper<D>,
    source: impl Read + Seek,
    order: Option<&[&str]>,
) -> Result<Extras> {
    restore(stepper, source, false, |header, stepper| torch::sort(header, stepper, order))
}

/// Opens a tensor file for `instep diff`. A checkpoint of this library is read completely, and its checksums are
/// verified.
///
/// # Errors
/// `Checkpoint` if the file is broken or a checksum differs, `File` if the file cannot be read. Both errors name the
/// path.
#[doc(hidden)]
pub fn open_checked(path: &Path) -> Result<(Header, Data<File>)> {
    restore::open_checked(safetensors::regular_file(path)?).map_err(|error| inside(path, error))
}
