//! Finds optimizers by name or by type, for programs that read their optimizer from a configuration.
//!
//! A name maps to a constructor, which gets hyperparameters by name. This module refuses a second entry for the same
//! name or type. PyTorch's `register_overlapped` searches the wrong table for an earlier entry, and silently replaces
//! that entry.

use std::any::{TypeId, type_name};

use crate::error::{Error, Result, one_of};
use crate::optim::{ALL, Custom, Descriptor, Optimizer, StepParam};

/// The hyperparameters that a constructor gets, by name. If the constructor does not read one of the names,
/// [`Resolved::build`] returns an error.
#[derive(Debug)]
pub struct Keywords<'a> {
    given: &'a [(&'a str, f64)],
    asked: Vec<&'static str>,
}

impl Keywords<'_> {
    /// Returns the value of the keyword `name`, or `default` if the caller gave no value.
    pub fn number(&mut self, name: &'static str, default: f64) -> f64 {
        self.asked.push(name);
        self.given.iter().find(|(given, _)| *given == name).map_or(default, |(_, value)| *value)
    }

    /// Returns the flag called `name`: 0 is false, 1 is true.
    ///
    /// # Errors
    /// `Config` for any other value.
    pub fn flag(&mut self, name: &'static str, default: bool) -> Result<bool> {
        match self.number(name, f64::from(u8::from(default))) {
            0.0 => Ok(false),
            1.0 => Ok(true),
            other => Err(Error::config(name, other, "not a flag", "use 0 or 1")),
        }
    }

    /// Returns an error if the constructor did not read one of the names, or if a name was given twice.
    fn finish(self, optimizer: &str) -> Result<()> {
        for (k, (name, _)) in self.given.iter().enumerate() {
            if !self.asked.contains(name) {
                let remedy = format!("use {}", one_of(name, self.asked.iter().copied()));
                return Err(Error::unsupported(
                    format_args!("`{name}`"),
                    format_args!("{optimizer} has no such hyperparameter"),
                    remedy,
                ));
            }
            if self.given[..k].iter().any(|(earlier, _)| earlier == name) {
                return Err(Error::config("hyperparameter", name, "given twice", "give it once"));
            }
        }
        Ok(())
    }
}

type Construct = Box<dyn Fn(&mut Keywords<'_>) -> Result<Box<dyn Optimizer>> + Send + Sync>;

struct Entry {
    name: String,
    of: TypeId,
    type_name: &'static str,
    construct: Construct,
}

/// A table of optimizers: each entry has a name, a type and a constructor.
///
/// ```
/// use instep::overlap::Registry;
/// use instep::{AdamW, Error, Layout, Solo, Stepper};
///
/// let registry = Registry::standard();
/// let optimizer = registry.resolve("AdamW")?.build(&[("lr", 1e-2), ("weight_decay", 0.1)])?;
/// let layout = Layout::builder().param("w", 4).build()?;
/// let stepper = Stepper::host(&layout, optimizer, Solo::default())?;
///
/// let error = registry.resolve("LARS").unwrap_err();
/// assert!(error.to_string().starts_with("optimizer `LARS`: not registered; use one of LAMB, "));
/// let by_type = registry.resolve_type::<AdamW>()?; // the same entry
/// assert_eq!(by_type.name(), "AdamW");
/// let fallback = registry.resolve_or("LARS", "SGD")?; // only because it is asked for
/// assert_eq!(fallback.name(), "SGD");
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `register_overlapped` and `_as_overlapped_optim` of PyTorch's `_optimizer_overlap`, and `functional_optim_map`.
#[derive(Default)]
pub struct Registry {
    entries: Vec<Entry>,
}

/// An entry of a registry.
#[derive(Clone, Copy)]
pub struct Resolved<'a> {
    entry: &'a Entry,
}

impl Registry {
    /// Builds an empty registry.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Adds an optimizer of this crate, with a name and defaults that you choose.
    ///
    /// # Errors
    /// `Config` if the name or the type already has an entry.
    pub fn register<O: Optimizer>(
        &mut self,
        name: impl Into<String>,
        construct: impl Fn(&mut Keywords<'_>) -> Result<O> + Send + Sync + 'static,
    ) -> Result<()> {
        self.add::<O>(name.into(), Box::new(move |keywords| Ok(Box::new(construct(keywords)?))))
    }

    /// Adds an optimizer of your own.
    ///
    /// ```
    /// # use instep::optim::{ParamStep, StepParam};
    /// # use instep::overlap::Registry;
    /// struct Nothing;
    /// impl StepParam for Nothing {
    ///     fn name(&self) -> &str {
    ///         "nothing"
    ///     }
    ///     fn step_param(&self, _: ParamStep<'_>) -> instep::Result<()> {
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let mut registry = Registry::standard();
    /// registry.register_custom("Nothing", |_| Ok(Nothing))?;
    /// assert!(registry.register_custom("Nothing", |_| Ok(Nothing)).is_err());
    /// assert!(registry.register_custom("Another", |_| Ok(Nothing)).is_err()); // the type has a name already
    /// assert_eq!(registry.resolve_type::<Nothing>()?.name(), "Nothing");
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors as for [`register`](Self::register).
    pub fn register_custom<S: StepParam + 'static>(
        &mut self,
        name: impl Into<String>,
        construct: impl Fn(&mut Keywords<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Result<()> {
        self.add::<S>(name.into(), Box::new(move |keywords| Ok(Box::new(Custom::new(construct(keywords)?)))))
    }

    /// Returns the entry with exactly this name.
    ///
    /// # Errors
    /// `Unsupported` if there is no such entry. The error lists the most similar names.
    pub fn resolve(&self, name: &str) -> Result<Resolved<'_>> {
        let found = self.entries.iter().find(|entry| entry.name == name);
        found.map(|entry| Resolved { entry }).ok_or_else(|| self.missing(name))
    }

    /// Returns the entry with this name. If there is no such entry, returns the entry named `fallback`.
    ///
    /// # Errors
    /// `Unsupported` if neither entry exists.
    pub fn resolve_or(&self, name: &str, fallback: &str) -> Result<Resolved<'_>> {
        self.resolve(name).or_else(|_| self.resolve(fallback))
    }

    /// Returns the entry of a type that implements [`Optimizer`] or [`StepParam`].
    ///
    /// # Errors
    /// `Unsupported` if there is no such entry. The error lists the most similar names.
    pub fn resolve_type<O: 'static>(&self) -> Result<Resolved<'_>> {
        let found = self.entries.iter().find(|entry| entry.of == TypeId::of::<O>());
        found.map(|entry| Resolved { entry }).ok_or_else(|| self.missing(type_name::<O>()))
    }

    /// Returns all names, in the order in which they were registered.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| &*entry.name)
    }

    fn missing(&self, name: &str) -> Error {
        // If the key is a type, the last part of its path is compared with the names.
        let given = name.rsplit("::").next().unwrap_or(name);
        let remedy = if self.entries.is_empty() {
            "register it first".to_owned()
        } else {
            format!("use {}, or register it first", one_of(given, self.names()))
        };
        Error::unsupported(format_args!("optimizer `{name}`"), "not registered", remedy)
    }

    /// Adds an entry. Returns an error if the name or the type already has an entry.
    fn add<T: 'static>(&mut self, name: String, construct: Construct) -> Result<()> {
        let (of, type_name) = (TypeId::of::<T>(), type_name::<T>());
        if self.entries.iter().any(|entry| entry.name == name) {
            return Err(Error::config("name", name, "registered already", "use another name"));
        }
        if self.entries.iter().any(|entry| entry.of == of) {
            let wrong = "registered already under another name";
            return Err(Error::config("type", type_name, wrong, "use that name"));
        }
        self.entries.push(Entry { name, of, type_name, construct });
        Ok(())
    }
}

impl<'a> Resolved<'a> {
    /// Returns the entry's name.
    pub fn name(self) -> &'a str {
        &self.entry.name
    }

    /// Builds the optimizer with these hyperparameters, and with defaults for all others.
    ///
    /// # Errors
    /// `Unsupported` for a hyperparameter that the optimizer does not have. The error lists the most similar names.
    /// `Config` for a hyperparameter that is given twice or is out of range.
    pub fn build(self, hyperparameters: &[(&str, f64)]) -> Result<Box<dyn Optimizer>> {
        let mut keywords = Keywords { given: hyperparameters, asked: Vec::new() };
        let optimizer = (self.entry.construct)(&mut keywords)?;
        keywords.finish(&self.entry.name)?;
        optimizer.as_rule().hyper()?;
        Ok(optimizer)
    }
}

impl std::fmt::Debug for Resolved<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.entry.name, self.entry.type_name)
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.entries.iter().map(|entry| Resolved { entry })).finish()
    }
}

impl Registry {
    /// Returns a registry of the optimizers of this crate, under their names in `torch.optim`. An optimizer that
    /// `torch.optim` lacks has the name from its paper. [`names`](Self::names) lists the names.
    ///
    /// Hyperparameters have the names of their fields. A pair has two keywords: `beta1` and `beta2` for `betas`,
    /// `eta_minus` and `eta_plus` for `etas`, `step_size_min` and `step_size_max` for `step_sizes`. Defaults are those
    /// of `torch.optim`. PyTorch's functional classes have other default learning rates: 1e-2 for SGD, and 1e-3 for
    /// Adamax.
    pub fn standard() -> Registry {
        let entry = |descriptor: &&'static Descriptor| {
            let (of, type_name) = (descriptor.type_of)();
            let descriptor = *descriptor;
            let construct: Construct = Box::new(|keywords| construct(descriptor, keywords));
            Entry { name: descriptor.name.to_owned(), of, type_name, construct }
        };
        Registry { entries: ALL.iter().map(entry).collect() }
    }
}

fn construct(descriptor: &Descriptor, keywords: &mut Keywords<'_>) -> Result<Box<dyn Optimizer>> {
    let mut optimizer = descriptor.build();
    for field in descriptor.fields {
        let defaults = field.default.numbers();
        let parts = field.parts.iter().zip(defaults);
        let numbers: Vec<f64> = parts.map(|(part, default)| keywords.number(part.keyword, default)).collect();
        optimizer.set(field.name, field.value(&numbers)?)?;
    }
    Ok(optimizer)
}
