//! virtio-iommu (`virtio 1.4 §5.13`): controls the guest memory that a function can access, and its addresses.
//!
//! [`mappings`], [`request`] and [`table`], which defines the effects of a request, have no side effects. A function's
//! workers translate through an [`Endpoint`]. Requests are handled on the vCPU's thread, in the exit of the doorbell:
//! Linux sends them with interrupts off and spins until completion, and a worker could need the very CPU that spins.
//! Memory that a request unmaps is unreachable when it completes.

mod change;
mod config;
mod counters;
mod device;
mod endpoint;
mod events;
mod fault;
mod gate;
mod mappings;
mod request;
mod requests;
mod state;
mod status;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod table;
mod unit;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use config::FIELDS;
pub use counters::{IommuCounter, IommuCounters};
pub use device::IommuDevice;
pub use endpoint::Endpoint;
#[cfg(test)]
pub(crate) use mappings::Range;
#[cfg(test)]
pub(crate) use request::Request;
#[cfg(test)]
pub(crate) use status::Status;
pub use unit::{ADDRESS_WIDTHS, Iommu, IommuAttachment};
