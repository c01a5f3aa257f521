//! The REST API: Cloud Hypervisor's, with additions for SR-IOV.
//!
//! `request` turns a request's method, path, body and descriptors into an [`Action`], without I/O. `server` owns the
//! threads, `connection` the bytes, and `service` joins the two. The control thread is the [`Handler`].

mod action;
mod connection;
mod exchange;
mod new_device;
#[cfg(test)]
mod openapi_tests;
mod read_only;
mod request;
mod response;
mod server;
mod service;
mod socket;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

pub use action::{Action, Failure, Handler, Reply};
pub use connection::{MOST_HEAD, PATIENCE};
pub use exchange::MOST_FDS;
pub use new_device::NewDevice;
pub use request::{ROUTES, Refusal, Request, Route};
pub use server::{Clients, MOST_CONNECTIONS, MOST_READERS, MOST_WORKERS, Server};
pub use service::MOST_BODY;
pub use socket::{ApiSocket, BoundSocket, Claim, SocketError};
pub use vm_api::body::{Fault, InjectFault, Link, MOST_FAULTS, RemoveDevice, Resize, ResizeDisk, ResizeZone, SetVf};
pub use vm_api::info;
