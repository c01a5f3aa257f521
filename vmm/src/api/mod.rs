//! The REST API: Cloud Hypervisor's, with what SR-IOV adds.
//!
//! `request` makes an [`Action`] of a request's method, path, body and descriptors, without I/O. `server` has the threads, `connection`
//! the bytes, `service` what is between. Whoever has the virtual machine is a [`Handler`].

mod action;
mod connection;
mod exchange;
pub mod info;
#[cfg(test)]
mod openapi_tests;
mod request;
mod response;
mod server;
mod service;
mod socket;

pub use action::{Action, Failure, FailureKind, Handler, Link, RemoveDevice, Reply, Resize, SetVf};
pub use connection::{MOST_HEAD, PATIENCE};
pub use exchange::MOST_FDS;
pub use request::{ROUTES, Refusal, Request, Route};
pub use server::{MOST_CONNECTIONS, MOST_WORKERS, Server};
pub use service::MOST_BODY;
pub use socket::{ApiSocket, BoundSocket, Claim, SocketError};
