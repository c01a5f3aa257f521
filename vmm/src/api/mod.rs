//! The REST API: Cloud Hypervisor's, with what SR-IOV adds.

mod action;

pub use action::{Action, Failure, FailureKind, Handler, Link, RemoveDevice, Reply, Resize, SetVf};
