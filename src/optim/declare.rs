//! The macro that turns a table into an optimizer. The macro generates a plain struct, its defaults, its descriptor,
//! and access to its fields by name.
//!
//! `table.rs` has the tables. The names after `=>` are fields of the kernel's struct of hyperparameters, so a name that
//! this struct lacks does not compile.

/// Declares an optimizer. Adagrad's table is the shortest example.
macro_rules! optimizer {
    (
        $(#[doc = $about:literal])*
        pub struct $type:ident: $name:literal {
            $(
                $(#[doc = $doc:literal])*
                pub $field:ident: $kind:tt = $default:tt => $($part:ident: $range:ident),+;
            )*
        }
        source: $source:literal;
        kernel: $kernel:ident, $member:ident $({ $($constant:ident: $constant_value:expr),* })?;
        $(states: [$($state:literal),*] $(if $($on:ident)&+)?;)+
        $(relations: $relations:expr;)?
        $(facts { $($fact:ident: $value:expr),* })?
    ) => {
        $(#[doc = $about])*
        #[doc = ""]
        #[doc = "# Source"]
        #[doc = $source]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $type {
            $(
                $(#[doc = $doc])*
                #[doc = concat!("Default ", stringify!($default), ".")]
                pub $field: $kind,
            )*
        }

        impl $type {
            /// This optimizer's hyperparameters, states and source as data.
            pub const DESCRIPTOR: &'static $crate::optim::Descriptor = &$crate::optim::Descriptor {
                fields: &[$($crate::optim::Field {
                    name: stringify!($field),
                    default: optimizer!(@value $kind, $default),
                    parts: optimizer!(@parts $kind, $field, $($part: $range),+),
                    doc: concat!($($doc),*),
                }),*],
                states: &[$($crate::optim::States {
                    names: &[$($state),*],
                    on: &[$($(stringify!($on)),+)?],
                }),+],
                $($($fact: $value,)*)?
                ..$crate::optim::declare::plain::<$type>($name, $source, $kernel)
            };
        }

        impl Default for $type {
            fn default() -> Self {
                $type { $($field: $default),* }
            }
        }

        impl $crate::optim::sealed::Rule for $type {
            fn descriptor(&self) -> Option<&'static $crate::optim::Descriptor> {
                Some($type::DESCRIPTOR)
            }

            fn get(&self, name: &str) -> Option<$crate::optim::Value> {
                match name {
                    $(stringify!($field) => Some(optimizer!(@value $kind, (self.$field))),)*
                    _ => None,
                }
            }

            fn put(&mut self, name: &str, value: $crate::optim::Value) -> bool {
                match (name, value) {
                    $((stringify!($field), optimizer!(@value $kind, new)) => self.$field = new,)*
                    _ => return false,
                }
                true
            }

            fn hyper(&self) -> $crate::error::Result<$crate::abi::InstepHyper> {
                $type::DESCRIPTOR.check(|name| self.get(name))?;
                $(let relations: fn(&Self) -> $crate::error::Result<()> = $relations;
                relations(self)?;)?
                // Every byte of the union must be set, because the union is copied to memory that a GPU reads.
                let mut hyper = $crate::abi::InstepHyper { words: [0.0; 8] };
                $(optimizer!(@hand_over $kind, self.$field, hyper.$member, $($part),+);)*
                $($(hyper.$member.$constant = $constant_value;)*)?
                Ok(hyper)
            }

            fn lr_mut(&mut self) -> &mut f64 {
                &mut self.lr
            }

            fn boxed(&self) -> Box<dyn $crate::optim::Optimizer> {
                Box::new(*self)
            }
        }
    };

    (@value f64, $x:tt) => { $crate::optim::Value::Number($x) };
    (@value (f64, f64), $x:tt) => { $crate::optim::Value::Pair($x) };
    (@value bool, $x:tt) => { $crate::optim::Value::Flag($x) };

    (@parts (f64, f64), $field:ident, $first:ident: $of_first:ident, $second:ident: $of_second:ident) => {
        &[
            optimizer!(@part stringify!($first), concat!(stringify!($field), ".0"), $of_first),
            optimizer!(@part stringify!($second), concat!(stringify!($field), ".1"), $of_second),
        ]
    };
    (@parts $kind:tt, $field:ident, $part:ident: $range:ident) => {
        &[optimizer!(@part stringify!($field), stringify!($field), $range)]
    };
    (@part $keyword:expr, $label:expr, $range:ident) => {
        $crate::optim::Part { keyword: $keyword, label: $label, range: $crate::optim::Range::$range }
    };

    (@hand_over (f64, f64), $from:expr, $to:expr, $first:ident, $second:ident) => {
        ($to.$first, $to.$second) = $from
    };
    (@hand_over $kind:tt, $from:expr, $to:expr, $part:ident) => { $to.$part = $from.into() };
}

pub(super) use optimizer;

use std::any::{TypeId, type_name};

use super::{Descriptor, Optimizer};

/// Returns a descriptor without hyperparameters, states and special properties. The macro adds the hyperparameters,
/// states and properties of the table.
pub(super) const fn plain<O: Optimizer + Default>(
    name: &'static str,
    source: &'static str,
    kernel: u32,
) -> Descriptor {
    Descriptor {
        name,
        fields: &[],
        states: &[],
        source,
        kernel,
        is_scaled: false,
        carried: None,
        needs_floats: None,
        needs_f32_states: None,
        make: || Box::new(O::default()),
        type_of: || (TypeId::of::<O>(), type_name::<O>()),
    }
}
