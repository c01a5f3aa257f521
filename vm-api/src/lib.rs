//! Requests and answers of the VMM's API.
//!
//! A VM's configuration has the same types on the command line and in JSON ([`config`]). [`body`] and [`migration`]
//! have the other requests' bodies, [`info`] the answers, [`document`] reads JSON, and [`typed`] makes types of it.
//! Nothing here opens anything or knows KVM; the rules that concern the whole VM are in the VMM.

pub mod body;
pub mod config;
pub mod document;
pub mod info;
pub mod migration;
pub mod typed;
