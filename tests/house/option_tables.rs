//! Compares `docs/optimizers.md` with the optimizers' descriptors, from which it is generated.
//!
//! `INSTEP_BLESS=1 cargo test --test main option_tables` writes the file. Without that variable the test only compares.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use instep::optim::{ALL, Descriptor, Field, States};

const HEADER: &str = "\
# Optimizers

Names and defaults on this page are those of `torch.optim`. An optimizer that PyTorch lacks has the name and the
defaults of its paper. A configuration of `instep replay` has the optimizer's name in lower case.
[reference/optimizers.rs](../reference/optimizers.rs) has each formula in f64, and tests compare the kernels with these
formulas. `tests/house/option_tables.rs` generates this page from the tables in `src/optim`.

## Formats

The table has the bytes per parameter for AdamW. \"In memory\" does not count the gradient. \"Moved by a step\" counts the
bytes that a step reads and writes, including those of the gradient.

| Parameters, states | In memory | Moved by a step | Rust: `Precision`; Python |
|---|---|---|---|
| f32, f32 | 12 | 28 | the default |
| f32, 8 bits | 6.03 | 16.1 | `moments: EightBit`; `states=\"8bit\"` |
| bf16 with f32 masters, f32 | 14 | 28 | `master: F32`; `master=\"float32\", states=\"float32\"` |
| bf16 with 16-bit remainders, 8 bits | 6.03 | 14.1 | `master: Remainder16`; `master=\"remainder16\", states=\"8bit\"` |
| bf16, bf16 | 6 | 14 | `param, grad: BF16`, `moments: BF16`; bf16 parameters |
| bf16 rounded stochastically, 8 bits | 4.03 | 10.1 | `rounding: Stochastic`; `seed=1, states=\"8bit\"` |

A remainder has the low 16 bits of an f32, which bf16 lacks, so a parameter and its remainder together are exactly an
f32. 8-bit states have one scale per 256 elements.

![Loss of a small GPT in three formats](loss.svg)

The curves come from `python python/benches/loss.py --svg docs/loss.svg`. This program trains a GPT of two layers for
500 steps on this repository's own text, with five seeds. The final losses are 2.338 in f32 (2.304 to 2.401, by seed),
2.332 with remainders, and 2.336 with stochastic rounding.
";

fn states(states: &States) -> String {
    let quoted = |names: &[&str], between: &str| {
        names.iter().map(|name| format!("`{name}`")).collect::<Vec<String>>().join(between)
    };
    let kept = if states.names.is_empty() { "none".to_owned() } else { quoted(states.names, ", ") };
    match states.on {
        [] => kept,
        on => format!("with {}: {kept}", quoted(on, " and ")),
    }
}

fn range(field: &Field) -> String {
    let mut ranges: Vec<String> = field.parts.iter().map(|part| part.range.to_string()).collect();
    ranges.dedup();
    ranges.join("; ")
}

fn section(text: &mut String, descriptor: &Descriptor) -> std::fmt::Result {
    let kept: Vec<String> = descriptor.states.iter().map(states).collect();
    writeln!(text, "\n## {}\n\n{}\n", descriptor.name, descriptor.source)?;
    writeln!(text, "States: {}.\n", kept.join("; "))?;
    writeln!(text, "| Option of `{}` | Default | Range | Meaning |\n|---|---|---|---|", descriptor.key())?;
    for field in descriptor.fields {
        let (name, default, range, doc) = (field.name, field.default, range(field), field.doc.trim());
        writeln!(text, "| `{name}` | {default} | {range} | {doc} |")?;
    }
    Ok(())
}

#[test]
fn the_page_of_optimizers_says_what_the_descriptors_say() {
    let mut text = HEADER.to_owned();
    ALL.iter().for_each(|descriptor| section(&mut text, descriptor).unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/optimizers.md");
    if std::env::var_os("INSTEP_BLESS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert!(fs::read_to_string(&path).unwrap() == text, "INSTEP_BLESS=1 writes docs/optimizers.md anew");
}
