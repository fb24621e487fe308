//! The result of each instruction, computed without the interpreter: by wide integers, f64, or single bits.
//!
//! A sum, product, quotient or root of f32 is that of f64, rounded once more; 53 bits are enough for that (Figueroa,
//! 1995).

use std::cmp::Ordering;

/// The register files of an instruction: `w` 32 bits, `d` 64 bits, `p` a predicate.
pub(crate) struct Files {
    pub result: char,
    /// Number of bits of the result; higher bits in a register do not count.
    pub bits: u32,
    pub sources: &'static str,
}

pub(crate) type Statement = Box<dyn Fn([u64; 4]) -> u64>;

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn double(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// Returns the bits of a result of f32 arithmetic: any NaN is the canonical one.
fn of_single(value: f32) -> u64 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits().into() }
}

fn of_double(value: f64) -> u64 {
    if value.is_nan() { 0x7fff_ffff_ffff_ffff } else { value.to_bits() }
}

fn sign_extended(value: u64, bits: u32) -> i128 {
    i128::from((value << (64 - bits)) as i64 >> (64 - bits))
}

fn zero_extended(value: u64, bits: u32) -> i128 {
    i128::from(value << (64 - bits) >> (64 - bits))
}

/// Returns the value of an operand of a type such as `s16`.
fn number(value: u64, kind: &str) -> i128 {
    let bits = kind[1..].parse().unwrap();
    if kind.starts_with('s') { sign_extended(value, bits) } else { zero_extended(value, bits) }
}

/// Returns a float of few bits: the nearest multiple of its last place, ties to the even one.
fn narrowed(value: f32, mantissa: i32, least: i32, largest: f64) -> f64 {
    let value = f64::from(value);
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = (value.abs().to_bits() >> 52) as i32 - 1023;
    let place = 2f64.powi(exponent.max(least) - mantissa);
    let rounded = (value / place).round_ties_even() * place;
    if rounded.abs() > largest { f64::INFINITY.copysign(value) } else { rounded }
}

fn f16_bits(value: f32) -> u64 {
    let sign = u64::from(value.to_bits() >> 31) << 15;
    let rounded = narrowed(value, 10, -14, 65504.0).abs();
    if value.is_nan() {
        0x7fff
    } else if rounded.is_infinite() {
        sign | 0x7c00
    } else if rounded < 2f64.powi(-14) {
        sign | (rounded * 2f64.powi(24)) as u64
    } else {
        let exponent = (rounded.to_bits() >> 52) as i64 - 1023;
        sign | ((exponent + 15) as u64) << 10 | rounded.to_bits() >> 42 & 0x3ff
    }
}

fn f16_value(bits: u64) -> f32 {
    let (exponent, fraction) = ((bits >> 10 & 31) as i32, (bits & 0x3ff) as f64);
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction != 0.0 => f64::NAN,
        31 => f64::INFINITY,
        _ => (fraction + 1024.0) * 2f64.powi(exponent - 25),
    };
    (if bits >> 15 & 1 == 1 { -size } else { size }) as f32
}

/// Inserts bits of the first operand into the second, bit by bit.
fn inserted([from, into, position, length]: [u64; 4], bits: u64) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let is_inserted = |k: u64| k >= position && k < position + length;
    (0..bits)
        .fold(0, |all, k| all | if is_inserted(k) { from >> (k - position) & 1 } else { into >> k & 1 } << k)
}

/// Returns the larger or smaller of two f32; NaN if one of them is, and -0 is less than +0.
fn extreme(a: f32, b: f32, wanted: Ordering) -> u64 {
    match a.partial_cmp(&b) {
        None => 0x7fff_ffff,
        Some(Ordering::Equal) => {
            let a_is_first = a.is_sign_negative() == (wanted == Ordering::Less);
            (if a_is_first { a } else { b }).to_bits().into()
        }
        Some(order) => (if order == wanted { a } else { b }).to_bits().into(),
    }
}

fn permuted(bytes: u64, how: u64) -> u64 {
    (0..4).fold(0, |all, k| {
        let selector = how >> (4 * k) & 15;
        let byte = bytes >> (8 * (selector & 7)) & 255;
        all | if selector < 8 { byte } else { 255 * (byte >> 7) } << (8 * k)
    })
}

fn compared(comparison: &str, order: Option<Ordering>) -> bool {
    let is = |orders: &[Ordering]| order.is_some_and(|order| orders.contains(&order));
    use Ordering::{Equal, Greater, Less};
    let unordered = comparison.len() == 3 && comparison.ends_with('u') && order.is_none();
    unordered
        || match comparison {
            "num" => order.is_some(),
            "nan" => order.is_none(),
            _ => match &comparison[..2] {
                "eq" => is(&[Equal]),
                "ne" => is(&[Less, Greater]),
                "lt" => is(&[Less]),
                "le" => is(&[Less, Equal]),
                "gt" => is(&[Greater]),
                _ => is(&[Greater, Equal]),
            },
        }
}

fn comparison(comparison: &str, kind: &str) -> (Files, Statement) {
    let (comparison, kind) = (comparison.to_owned(), kind.to_owned());
    let sources = if kind.ends_with("64") { "dd" } else { "ww" };
    let statement = move |[a, b, ..]: [u64; 4]| {
        let order = match kind.as_str() {
            "f32" => single(a).partial_cmp(&single(b)),
            "f64" => double(a).partial_cmp(&double(b)),
            kind => Some(number(a, kind).cmp(&number(b, kind))),
        };
        compared(&comparison, order).into()
    };
    (Files { result: 'p', bits: 1, sources }, Box::new(statement))
}

/// A shift as a multiplication or division by a power of two, however large.
fn shifted(parts: &[&str], [a, by, ..]: [u64; 4]) -> u64 {
    let a = number(a, &parts[1].replace('b', "u"));
    let by = (by as u32).min(100);
    (if parts[0] == "shl" { a.wrapping_shl(by) } else { a >> by }) as u64
}

fn converted(parts: &[&str], a: u64) -> u64 {
    let to = |bits: u32, value: i128| zero_extended(value as u64, bits) as u64;
    match parts {
        ["cvt", "f32", "f16"] => of_single(f16_value(a)),
        ["cvt", "f32", "bf16"] => of_single(single(a << 16 & 0xffff_0000)),
        ["cvt", "rn", "f16", "f32"] => f16_bits(single(a)),
        ["cvt", "rn", "bf16", "f32"] if single(a).is_nan() => 0x7fff,
        ["cvt", "rn", "bf16", "f32"] => {
            let largest = f64::from(f32::from_bits(0x7f7f_0000));
            u64::from((narrowed(single(a), 7, -126, largest) as f32).to_bits() >> 16)
        }
        ["cvt", "f64", "f32"] => of_double(single(a).into()),
        ["cvt", "rn", "f32", "f64"] => of_single(double(a) as f32),
        ["cvt", "rn", "f32", kind] => {
            // 64 bits hold every one of these integers as f64.
            ((number(a, kind) as f64) as f32).to_bits().into()
        }
        ["cvt", "rn", "f64", kind] => (number(a, kind) as f64).to_bits(),
        ["cvt", "rzi", "u64", "f64"] if double(a).is_nan() => 1 << 63,
        ["cvt", "rzi", "u64", "f64"] => double(a).trunc().clamp(0.0, 2f64.powi(64)) as u64,
        ["cvt", "s16", "s8"] => to(16, number(a, "s8")),
        ["cvt", "u16", "u8"] => to(16, number(a, "u8")),
        ["cvt", "s32", "s16"] => to(32, number(a, "s16")),
        ["cvt", "s64", "s32"] => number(a, "s32") as u64,
        _ => to(parts[1][1..].parse().unwrap(), number(a, parts[2])),
    }
}

/// Returns the files and the expected result of an instruction, if this file has one.
pub(crate) fn expected(opcode: &str) -> Option<(Files, Statement)> {
    let parts: Vec<&str> = opcode.split('.').collect();
    if let ["setp", compares, kind] = parts[..] {
        return Some(comparison(compares, kind));
    }
    let is_wide = |kind: &str| kind.ends_with("64");
    let last = *parts.last()?;
    let file = |kind: &str| match kind {
        "pred" => 'p',
        kind if is_wide(kind) => 'd',
        _ => 'w',
    };
    let bits_of =
        |kind: &str| kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse().unwrap_or(1);
    let kept = |value: i128| value as u64;
    let sources: &'static str = match (parts[0], file(last)) {
        ("mov" | "not" | "neg" | "abs" | "sqrt" | "rcp" | "cvt" | "cvta", 'w') => "w",
        ("mov" | "not" | "neg" | "abs" | "sqrt" | "rcp" | "cvt" | "cvta", 'd') => "d",
        ("mov" | "not", _) => "p",
        ("selp", 'w') => "wwp",
        ("selp", _) => "ddp",
        ("shl" | "shr", 'd') => "dw",
        ("bfi", 'w') => "wwww",
        ("bfi", _) => "ddww",
        ("prmt" | "mad", _) => "www",
        ("fma", _) => "ddd",
        (_, 'w') => "ww",
        (_, 'd') => "dd",
        _ => "pp",
    };
    let (result, bits) = match parts[..] {
        ["cvt", .., to, _] => (file(to), bits_of(to)),
        ["mul", "wide", kind] => (if kind.ends_with("32") { 'd' } else { 'w' }, 2 * bits_of(kind)),
        _ => (file(last), bits_of(last)),
    };
    let owned: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
    let statement: Statement = match parts[..] {
        ["mov" | "cvta", ..] => Box::new(|[a, ..]| a),
        ["selp", _] => Box::new(|[a, b, choice, _]| if choice == 1 { a } else { b }),
        ["cvt", ..] => Box::new(move |[a, ..]| {
            let parts: Vec<&str> = owned.iter().map(String::as_str).collect();
            converted(&parts, a)
        }),
        ["shl" | "shr", _] => Box::new(move |operands| {
            let parts: Vec<&str> = owned.iter().map(String::as_str).collect();
            kept(shifted(&parts, operands) as i128)
        }),
        ["bfi", "b32"] => Box::new(|operands| inserted(operands, 32)),
        ["bfi", "b64"] => Box::new(|operands| inserted(operands, 64)),
        ["prmt", "b32"] => Box::new(|[a, b, how, _]| permuted(a | b << 32, how)),
        ["and", ..] => Box::new(|[a, b, ..]| a & b),
        ["or", ..] => Box::new(|[a, b, ..]| a | b),
        ["xor", ..] => Box::new(|[a, b, ..]| a ^ b),
        ["not", "pred"] => Box::new(|[a, ..]| 1 - a),
        ["not", _] => Box::new(move |[a, ..]| kept(-1 - a as i128)),
        ["neg", "s16" | "s32" | "s64"] => Box::new(move |[a, ..]| kept(-(a as i128))),
        ["neg", "f32"] => Box::new(|[a, ..]| of_single(-single(a))),
        ["neg", "f64"] => Box::new(|[a, ..]| a ^ 1 << 63),
        ["abs", "f32"] => Box::new(|[a, ..]| of_single(single(a).abs())),
        ["abs", "f64"] => Box::new(|[a, ..]| double(a).abs().to_bits()),
        ["max", "NaN", "f32"] => Box::new(|[a, b, ..]| extreme(single(a), single(b), Ordering::Greater)),
        ["min", "NaN", "f32"] => Box::new(|[a, b, ..]| extreme(single(a), single(b), Ordering::Less)),
        [operation @ ("add" | "sub" | "mul" | "div"), "rn", kind] => arithmetic(operation, kind),
        ["fma", "rn", "f64"] => Box::new(|[a, b, c, _]| of_double(double(a).mul_add(double(b), double(c)))),
        ["sqrt", "rn", "f32"] => Box::new(|[a, ..]| of_single(f64::from(single(a)).sqrt() as f32)),
        // Off by 2^-11, so that nobody depends on its last places; a subnormal is zero.
        ["sqrt", "approx", "ftz", "f32"] => Box::new(|[a, ..]| {
            let x = single(a);
            let x = if x.is_subnormal() { 0.0 * x } else { x };
            let off = if a & 1 == 0 { 2049.0 } else { 2047.0 } / 2048.0;
            of_single((f64::from(f64::from(x).sqrt() as f32) * off) as f32)
        }),
        ["sqrt", "rn", "f64"] => Box::new(|[a, ..]| of_double(double(a).sqrt())),
        ["rcp", "rn", "f32"] => Box::new(|[a, ..]| of_single((1.0 / f64::from(single(a))) as f32)),
        ["rcp", "rn", "f64"] => Box::new(|[a, ..]| of_double(1.0 / double(a))),
        [operation, .., kind] => {
            let (operation, kind) = (operation.to_owned(), kind.to_owned());
            let exact = move |[a, b, c, _]: [u64; 4]| {
                let (a, b, c) = (number(a, &kind), number(b, &kind), number(c, &kind));
                let value = match operation.as_str() {
                    "add" => a + b,
                    "sub" => a - b,
                    "mul" => a.wrapping_mul(b),
                    "mad" => a.wrapping_mul(b) + c,
                    "div" => a / b,
                    "rem" => a % b,
                    "min" => a.min(b),
                    "max" => a.max(b),
                    other => panic!("{other} has no statement"),
                };
                value as u64
            };
            Box::new(exact)
        }
        _ => return None,
    };
    Some((Files { result, bits, sources }, statement))
}

fn arithmetic(operation: &str, kind: &str) -> Statement {
    let of = |operation: &str, a: f64, b: f64| match operation {
        "add" => a + b,
        "sub" => a - b,
        "mul" => a * b,
        _ => a / b,
    };
    let operation = operation.to_owned();
    if kind == "f32" {
        return Box::new(move |[a, b, ..]| {
            of_single(of(&operation, single(a).into(), single(b).into()) as f32)
        });
    }
    Box::new(move |[a, b, ..]| of_double(of(&operation, double(a), double(b))))
}
