//! The result of a comparison, as JSON and as text.
//!
//! cli/README.md documents the keys. Later versions may add keys, but do not change existing ones.

use serde::Serialize;

use super::Tolerance;

/// The comparison of two files.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether both files have the same tensors, with the same types, shapes and bits, and the same step counts.
    /// Products of momenta must also be the same, unless the tolerance accepts their difference.
    pub equal: bool,
    /// Whether the files are equal, or differ only in values that the tolerance accepts. If this is true, the exit
    /// status is 0.
    pub within: bool,
    /// The largest difference in any tensor. A difference outside the tolerance counts as larger than any difference
    /// within it.
    pub worst: Option<Located>,
    /// The comparison of each tensor that both files have, in the order of the tensors' names.
    pub tensors: Vec<Compared>,
    /// Names of tensors that only the first file has.
    pub only_in_a: Vec<String>,
    /// Names of tensors that only the second file has.
    pub only_in_b: Vec<String>,
    /// Step counts that differ, and products of momenta with a difference that the tolerance does not accept.
    pub counts: Vec<Count>,
}

/// The comparison of a tensor that both files have.
#[derive(Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The tensor's name.
    pub name: String,
    /// The tensor's type in the first file.
    pub dtype_a: &'static str,
    /// The tensor's type in the second file.
    pub dtype_b: &'static str,
    /// The tensor's shape in the first file.
    pub shape_a: Vec<u64>,
    /// The tensor's shape in the second file.
    pub shape_b: Vec<u64>,
    /// Number of elements that differ in a bit; 0 if shapes or types differ, because then no elements are compared.
    pub different: u64,
    /// Number of elements that the tolerance does not accept.
    pub outside: u64,
    /// The largest difference.
    pub worst: Option<Worst>,
}

/// The largest difference within a tensor, or the first of several equally large differences.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// The element's index in row-major order.
    pub index: u64,
    /// The distance between the two values, or null if either value is NaN. The distance between the two zeros is 0.
    pub ulp: Option<u64>,
    /// The first file's value, as text because JSON has no NaN.
    pub a: String,
    /// The second file's value.
    pub b: String,
    #[serde(skip)]
    pub(super) is_outside: bool,
}

/// The largest difference in any tensor, with the name of this tensor.
#[derive(Debug, PartialEq, Serialize)]
pub struct Located {
    /// The tensor's name.
    pub tensor: String,
    /// The element.
    #[serde(flatten)]
    pub element: Worst,
}

/// A step count or product of momenta that differs between the files.
#[derive(Debug, PartialEq, Serialize)]
pub struct Count {
    /// The number's key in the metadata.
    pub key: String,
    /// The number in the first file, or `None` if this file lacks it.
    pub a: Option<String>,
    /// The number in the second file, or `None` if this file lacks it.
    pub b: Option<String>,
}

impl Compared {
    pub(super) fn has_same_form(&self) -> bool {
        self.shape_a == self.shape_b && self.dtype_a == self.dtype_b
    }

    fn line(&self, exact: bool) -> String {
        let Compared { name, dtype_a, dtype_b, shape_a, shape_b, different, outside, worst } = self;
        match worst {
            _ if shape_a != shape_b => format!("{name}: shape {shape_a:?} and {shape_b:?}"),
            _ if dtype_a != dtype_b => format!("{name}: {dtype_a} and {dtype_b}"),
            None => format!("{name}: equal"),
            Some(worst @ Worst { index, a, b, .. }) => {
                let elements: u64 = shape_a.iter().product();
                let most = worst.ulp_text();
                let outside =
                    if exact { String::new() } else { format!(", {outside} outside the tolerance") };
                format!(
                    "{name}: {different} of {elements} differ{outside}, most by {most} ulp at {index}: {a} and {b}"
                )
            }
        }
    }
}

impl Worst {
    pub(super) fn size(&self) -> (bool, u64) {
        size(self.is_outside, self.ulp)
    }

    fn ulp_text(&self) -> String {
        self.ulp.map_or("no number of".into(), |ulp| ulp.to_string())
    }
}

/// Returns a key by which differences are ordered. A difference outside the tolerance has a larger key than any
/// difference within it. Of two differences that are both outside or both within, the one with the larger distance has
/// the larger key.
pub(super) fn size(is_outside: bool, ulp: Option<u64>) -> (bool, u64) {
    // There is no distance if a value is NaN. If the tolerance does not accept the values, they count as farther apart
    // than any two numbers. If it accepts them, both are NaN and count as equal.
    let farthest = if is_outside { u64::MAX } else { 0 };
    (is_outside, ulp.unwrap_or(farthest))
}

impl Report {
    /// Computes the overall result from the tensors and counts.
    pub(super) fn conclude(&mut self) {
        let names_agree = self.only_in_a.is_empty() && self.only_in_b.is_empty();
        let rest_agrees =
            names_agree && self.counts.is_empty() && self.tensors.iter().all(Compared::has_same_form);
        self.equal = rest_agrees && self.tensors.iter().all(|tensor| tensor.different == 0);
        self.within = rest_agrees && self.tensors.iter().all(|tensor| tensor.outside == 0);
        for tensor in &self.tensors {
            let Some(element) = &tensor.worst else { continue };
            if self.worst.as_ref().is_none_or(|worst| element.size() > worst.element.size()) {
                self.worst = Some(Located { tensor: tensor.name.clone(), element: element.clone() });
            }
        }
    }

    pub(super) fn text(&self, tolerance: &Tolerance) -> String {
        let exact = tolerance.is_exact();
        let mut lines: Vec<String> = self.tensors.iter().map(|tensor| tensor.line(exact)).collect();
        lines.extend(self.only_in_a.iter().map(|name| format!("{name}: only in the first file")));
        lines.extend(self.only_in_b.iter().map(|name| format!("{name}: only in the second file")));
        for Count { key, a, b } in &self.counts {
            let shown = |count: &Option<String>| count.clone().unwrap_or_else(|| "none".into());
            lines.push(format!("{key}: {} and {}", shown(a), shown(b)));
        }
        let verdict = match (self.equal, self.within, exact) {
            (true, ..) => "equal",
            (_, true, _) => "within the tolerance",
            (.., true) => "different",
            _ => "outside the tolerance",
        };
        let worst = self.worst.as_ref().map_or(String::new(), |Located { tensor, element }| {
            let Worst { index, a, b, .. } = element;
            format!("; worst: {tensor} at {index}: {a} and {b}, {} ulp", element.ulp_text())
        });
        lines.push(format!("{verdict}{worst}"));
        lines.join("\n") + "\n"
    }
}
