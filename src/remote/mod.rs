//! The client of the API: `ch-remote`.

pub(crate) mod add;
pub(crate) mod client;
pub(crate) mod command;
pub(crate) mod counters;
pub(crate) mod descriptor;
pub(crate) mod indices;
pub(crate) mod request;
pub(crate) mod show;
pub(crate) mod vf_change;
pub(crate) mod vf_table;
pub(crate) mod vfs;
