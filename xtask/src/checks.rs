//! The parts of `cargo xtask test`, and the checks that take too long for it.

pub(crate) mod ahead;
pub(crate) mod check;
pub(crate) mod clients;
pub(crate) mod contract;
pub(crate) mod coverage;
pub(crate) mod deny;
pub(crate) mod fuzz;
pub(crate) mod miri;
pub(crate) mod rust_text;
pub(crate) mod splice;
pub(crate) mod suite;
