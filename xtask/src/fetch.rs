//! Packages and tools of others: where they come from, and how they are installed.

pub(crate) mod apt;
pub(crate) mod nightly;
pub(crate) mod python;
pub(crate) mod sources;
