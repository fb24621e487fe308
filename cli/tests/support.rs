//! Makes a folder with a configuration and an input, and runs the command in this folder.
//!
//! This file must write and read tensor files only with the `safetensors` crate.

// The library's tests have these modules under `support` too, so the modules' paths to each other are the same there.
#[path = "../../tests/support/entries.rs"]
mod entries;
#[path = "../../tests/support/hardware.rs"]
#[allow(dead_code)]
pub(crate) mod hardware;
#[path = "../../tests/support/stand_in/mod.rs"]
#[allow(dead_code)]
pub(crate) mod stand_in;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use instep::optim::{Descriptor, Field, Optimizer, Range};
use instep::{DType, Layout, Solo, Stepper};
use instep::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;

/// Tensors and metadata of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Content {
    /// The shape, elements and type of each tensor. The bits of an element are the low bits of a `u32`.
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<u32>, Dtype)>,
    pub metadata: BTreeMap<String, String>,
}

impl Content {
    pub(crate) fn with(mut self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bits = values.iter().map(|value| value.to_bits()).collect();
        self.tensors.insert(name.into(), (shape.to_vec(), bits, Dtype::F32));
        self
    }

    /// The same values in another type, which must represent all of them exactly.
    pub(crate) fn retyped(mut self, name: &str, dtype: DType) -> Self {
        let (values, (shape, ..)) = (self.values(name), self.tensors.remove(name).unwrap());
        let (dtype, bits): (_, fn(f32) -> u32) = match dtype {
            DType::BF16 => (Dtype::BF16, |value| bf16::from_f32(value).to_bits().into()),
            DType::F16 => (Dtype::F16, |value| f16::from_f32(value).to_bits().into()),
            _ => (Dtype::F32, f32::to_bits),
        };
        self.tensors.insert(name.into(), (shape, values.into_iter().map(bits).collect(), dtype));
        assert_eq!(self.tensors[name].0.iter().product::<usize>(), self.tensors[name].1.len());
        self
    }

    pub(crate) fn with_count(mut self, name: &str, count: &str) -> Self {
        self.metadata.insert(format!("step.{name}"), count.into());
        self
    }

    pub(crate) fn values(&self, name: &str) -> Vec<f32> {
        let (_, bits, dtype) =
            self.tensors.get(name).unwrap_or_else(|| panic!("{name} is missing: {self:?}"));
        let value = |bits: &u32| match dtype {
            Dtype::BF16 => bf16::from_bits(*bits as u16).to_f32(),
            Dtype::F16 => f16::from_bits(*bits as u16).to_f32(),
            _ => f32::from_bits(*bits),
        };
        bits.iter().map(value).collect()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let bytes = self.tensors.iter().map(|(name, (shape, bits, dtype))| {
            let element = |bits: &u32| bits.to_le_bytes().into_iter().take(dtype.bitsize() / 8);
            (name, shape, dtype, bits.iter().flat_map(element).collect::<Vec<u8>>())
        });
        let bytes: Vec<_> = bytes.collect();
        let views = bytes.iter().map(|(name, shape, dtype, bytes)| {
            (name.as_str(), TensorView::new(**dtype, (*shape).clone(), bytes).unwrap())
        });
        let metadata: HashMap<_, _> = self.metadata.clone().into_iter().collect();
        serialize(views, (!metadata.is_empty()).then_some(metadata)).unwrap()
    }

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let file = SafeTensors::deserialize(bytes).unwrap();
        let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            assert!([Dtype::F32, Dtype::BF16, Dtype::F16].contains(&view.dtype()), "{name}");
            let size = view.dtype().bitsize() / 8;
            let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            assert_eq!(offset % size, 0, "{name} lies at {offset}");
            let bits = view.data().chunks_exact(size);
            let bits =
                bits.map(|bytes| bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte)));
            (name.to_owned(), (view.shape().to_vec(), bits.collect(), view.dtype()))
        });
        let metadata = header.metadata().clone().unwrap_or_default().into_iter();
        Content { tensors: tensors.collect(), metadata: metadata.collect() }
    }
}

/// A folder for one test.
pub(crate) struct Folder {
    folder: TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        Folder { folder: TempDir::new().unwrap() }
    }

    /// A folder with `C.json` and `IN`.
    pub(crate) fn of(config: &str, input: &Content) -> Self {
        let folder = Folder::new();
        folder.write("C.json", config.as_bytes());
        folder.write("IN", &input.bytes());
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Returns the names of the files in the folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Returns the command for this folder, without the environment variables that change its defaults.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_instep"));
        for name in
            ["INSTEP_ISA", "INSTEP_THREADS", "INSTEP_SPIN_US", "INSTEP_PREFETCH", "INSTEP_DEADLINE_MS"]
        {
            command.env_remove(name);
        }
        command.args(arguments).current_dir(self.folder.path());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Replays `C.json` on `IN` into `OUT`.
    pub(crate) fn replay(&self, more: &[&str]) -> Output {
        let arguments = ["replay", "--config", "C.json", "--input", "IN", "--output", "OUT"];
        self.run(&[arguments.as_slice(), more].concat())
    }
}

/// The output of a replay that succeeds.
pub(crate) fn replayed(config: &str, input: &Content, more: &[&str]) -> Content {
    let folder = Folder::of(config, input);
    let output = folder.replay(more);
    assert_eq!(output.status.code(), Some(0), "{config}: {}", stderr(&output));
    assert!(output.stderr.is_empty());
    Content::parse(&folder.read("OUT"))
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Checks a refusal: status 2, nothing on stdout, one line on stderr with `word` in it.
pub(crate) fn assert_refused(output: &Output, word: &str) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{word}: {message}");
    assert!(output.stdout.is_empty());
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("instep: ") && message.contains(word), "no {word:?} in {message:?}");
}

/// Values that look arbitrary and are the same everywhere.
pub(crate) fn painted(seed: u64, count: usize) -> Vec<f32> {
    let value = |k: usize| {
        let hash = (seed << 32 | k as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((hash >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 4.0
    };
    (0..count).map(value).collect()
}

/// Parameters of these names and shapes, with gradients for `passes` passes.
pub(crate) fn input(params: &[(&str, &[usize])], passes: u64) -> Content {
    let mut content = Content::default();
    for (k, (name, shape)) in params.iter().enumerate() {
        let count = shape.iter().product();
        content = content.with(&format!("param.{name}"), shape, &painted(1000 + k as u64, count));
        for pass in 0..passes {
            let values = painted(pass * 100 + k as u64, count);
            content = content.with(&format!("grad.{pass}.{name}"), shape, &values);
        }
    }
    content
}

/// Returns options of a parameter group, each as a JSON member that begins with a comma. Each option changes one field
/// of the optimizer from its default.
pub(crate) fn changed_options(descriptor: &Descriptor) -> Vec<String> {
    let changed = |field: &Field| {
        let mut optimizer = descriptor.build();
        let numbers: Vec<f64> = field
            .parts
            .iter()
            .zip(field.default.numbers())
            .map(|(part, default)| match part.range {
                Range::Flag => 1.0 - default,
                Range::AboveOne => default + 0.5,
                Range::InsideOne | Range::BelowOne | Range::UpToOne => default / 2.0,
                _ => default / 2.0 + 0.1,
            })
            .collect();
        let value = field.value(&numbers).unwrap();
        optimizer.set(field.name, value).unwrap();
        let layout = Layout::builder().param("w", 1).build().unwrap();
        // Some are refused alone, as Nesterov without a momentum is.
        let built = Stepper::host(&layout, optimizer, Solo::default());
        built.is_ok().then(|| format!(r#","{}":{value}"#, field.name))
    };
    descriptor.fields.iter().filter_map(changed).collect()
}
