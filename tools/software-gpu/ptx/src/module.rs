//! A PTX text as a whole: its variables, its kernels, their parameters.
//!
//! Parsing decodes every kernel, so a module that parses has no unknown instruction.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::decode::{self, Program, Symbol};
use crate::error::{Error, syntax};
use crate::syntax::{Array, Body, Tokens, array};

/// The start of shared memory, so that the null address is outside it.
pub(crate) const SHARED_BASE: u32 = 1024;
/// Bytes between shared arrays that belong to none.
const SHARED_GAP: u32 = 64;

/// A PTX text, decoded.
#[derive(Clone, Debug)]
pub struct Module {
    target: String,
    variables: Vec<Variable>,
    kernels: Vec<Kernel>,
}

/// The address space of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Kernels may write it.
    Global,
    /// Kernels only read it.
    Const,
}

/// A variable of a module; its loader finds memory for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// The name in the text.
    pub name: String,
    /// The address space of the variable.
    pub space: Space,
    /// The alignment, a power of two.
    pub align: u64,
    /// Its first values; zeros if the text gives none.
    pub initial: Vec<u8>,
}

/// A parameter of a kernel, in the bytes that a launch is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// The offset from the start of all parameters.
    pub offset: u64,
    /// Number of its bytes.
    pub bytes: u64,
}

/// A kernel, decoded.
#[derive(Clone, Debug)]
pub struct Kernel(pub(crate) Arc<Entry>);

#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub params: Vec<Param>,
    /// The largest number of threads of a block, from `.maxntid` or `.reqntid`.
    pub most_threads: u32,
    /// The address and the bytes of each static array.
    pub shared: Vec<(u32, u32)>,
    /// The start of dynamic shared memory.
    pub dynamic: u32,
    decoded: Program,
    ready: OnceLock<Program>,
    pub text: Arc<str>,
}

impl Module {
    /// Parses and decodes a whole text.
    ///
    /// # Errors
    /// The first line that this crate does not know, with the text at that place.
    pub fn parse(text: &str) -> Result<Module, Error> {
        let shared_text: Arc<str> = text.into();
        let mut tokens = Tokens::split(text)?;
        let mut module = Module { target: String::new(), variables: Vec::new(), kernels: Vec::new() };
        let mut outer = HashMap::new();
        while tokens.peek().is_some() {
            let line = tokens.line();
            match tokens.word()? {
                ".version" => drop(tokens.word()?),
                ".target" => {
                    module.target = tokens.word()?.to_owned();
                    while tokens.take(",") {
                        tokens.word()?;
                    }
                }
                ".address_size" => match tokens.small()? {
                    64 => {}
                    other => return Err(syntax(line, format!("addresses of {other} bits"))),
                },
                ".visible" | ".weak" => {}
                ".extern" => {
                    tokens.expect(".shared")?;
                    let array = array(&mut tokens)?;
                    tokens.expect(";")?;
                    outer.insert(array.name, Outer::Dynamic);
                }
                directive @ (".global" | ".const") => {
                    let array = array(&mut tokens)?;
                    tokens.expect(";")?;
                    outer.insert(array.name, Outer::Variable(module.variables.len() as u32));
                    let space = if directive == ".global" { Space::Global } else { Space::Const };
                    module.variables.push(variable(array, space));
                }
                ".entry" => {
                    let kernel = Entry::read(&mut tokens, &outer, &shared_text)?;
                    module.kernels.push(Kernel(Arc::new(kernel)));
                }
                other => return Err(syntax(line, format!("{other}: unknown directive of a module"))),
            }
        }
        Ok(module)
    }

    /// Returns the architecture for which the text was made, such as `sm_90`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns the variables, in the order in which [`Launch::variables`](crate::Launch::variables) has their
    /// addresses.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Returns the kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name() == name)
    }

    /// Returns all kernels, in the order of the text.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }
}

fn variable(array: Array, space: Space) -> Variable {
    let mut initial = array.initial;
    initial.resize(array.bytes as usize, 0);
    Variable { name: array.name.to_owned(), space, align: array.align, initial }
}

enum Outer {
    /// Shared memory whose size comes with the launch.
    Dynamic,
    Variable(u32),
}

impl Kernel {
    /// Returns the name in the text.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the parameters in their order.
    pub fn params(&self) -> &[Param] {
        &self.0.params
    }

    /// Returns how many bytes the parameters of a launch have.
    pub fn param_bytes(&self) -> u64 {
        self.0.params.last().map_or(0, |param| param.offset + param.bytes)
    }

    /// Returns the largest number of threads of a block.
    pub fn most_threads(&self) -> u32 {
        self.0.most_threads
    }

    /// Returns how many bytes the static shared arrays have.
    pub fn shared_bytes(&self) -> u32 {
        self.0.shared.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns how many instructions the kernel has.
    pub fn instructions(&self) -> usize {
        self.0.decoded.instructions.len()
    }
}

impl Entry {
    /// Returns the program that runs. Most kernels of a module are never launched, so their rows are allocated at the
    /// first launch.
    pub(crate) fn program(&self) -> &Program {
        self.ready.get_or_init(|| self.decoded.allocated())
    }

    fn read(tokens: &mut Tokens, outer: &HashMap<&str, Outer>, text: &Arc<str>) -> Result<Entry, Error> {
        let line = tokens.line();
        let name = tokens.word()?.to_owned();
        let (mut params, mut end) = (Vec::new(), 0u64);
        let mut names = Vec::new();
        if tokens.take("(") {
            while !tokens.take(")") {
                tokens.take(",");
                tokens.expect(".param")?;
                let array = array(tokens)?;
                let offset = end.next_multiple_of(array.align);
                end = offset + array.bytes;
                params.push(Param { offset, bytes: array.bytes });
                names.push((array.name, Symbol::Param(offset)));
            }
        }
        let mut most_threads = 1024;
        while !tokens.take("{") {
            match tokens.word()? {
                ".maxntid" | ".reqntid" => {
                    most_threads = tokens.small()?;
                    while tokens.take(",") {
                        most_threads = most_threads.saturating_mul(tokens.small()?);
                    }
                }
                // How many blocks an assembler should find registers for.
                ".minnctapersm" | ".maxnreg" => drop(tokens.small()?),
                other => return Err(syntax(line, format!("{other}: unknown directive of a kernel"))),
            }
        }
        let body = Body::read(tokens)?;
        let mut symbols: HashMap<&str, Symbol> = names.into_iter().collect();
        let (mut shared, mut at) = (Vec::new(), SHARED_BASE);
        for array in &body.shared {
            let bytes = u32::try_from(array.bytes).ok().filter(|bytes| *bytes <= 1 << 20);
            let bytes = bytes.ok_or_else(|| syntax(line, format!("{} is too large", array.name)))?;
            at = at.next_multiple_of(array.align.max(16) as u32);
            symbols.insert(array.name, Symbol::Shared(at));
            shared.push((at, bytes));
            at += bytes + SHARED_GAP;
        }
        let dynamic = at.next_multiple_of(1024);
        for (name, outer) in outer {
            let symbol = match outer {
                Outer::Dynamic => Symbol::Shared(dynamic),
                Outer::Variable(index) => Symbol::Variable(*index),
            };
            symbols.entry(name).or_insert(symbol);
        }
        let decoded = decode::program(&body, &symbols)?;
        Ok(Entry {
            name,
            params,
            most_threads,
            shared,
            dynamic,
            decoded,
            ready: OnceLock::new(),
            text: text.clone(),
        })
    }
}
