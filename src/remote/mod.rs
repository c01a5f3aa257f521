//! The client of the API: `ch-remote`.

pub mod client;
pub mod command;
pub mod request;
pub mod show;
pub mod vfs;
