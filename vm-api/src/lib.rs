//! Requests and replies of the VMM's API.
//!
//! A VM's configuration has the same types on the command line and in JSON ([`config`]). [`body`] and [`migration`]
//! have the other requests' bodies, [`info`] the replies; [`document`] parses JSON, [`typed`] converts it to types.
//! [`schema`] describes a type for the API's description, and [`openapi`] all of them. [`channel`] has the requests of
//! a guest about its VFs, which reach the VMM by a port of a virtio console.
//! Nothing here opens resources or uses KVM; the VMM checks the rules that concern the whole VM.

pub mod body;
pub mod channel;
pub mod config;
pub mod counters;
pub mod document;
pub mod info;
pub mod migration;
pub mod openapi;
pub mod schema;
mod similar;
pub mod typed;
