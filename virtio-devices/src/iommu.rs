//! virtio-iommu (`virtio 1.4 §5.13`): decides which of the guest's memory a function reaches, and by which addresses.
//!
//! Pure are [`mappings`], [`request`] and [`table`], which says what a request does. An [`Endpoint`] is what a
//! function's workers translate by. Requests are answered on the vCPU's thread, in the exit of the doorbell: Linux
//! sends them with interrupts off and spins until the answer is there, and a worker could need the very CPU that
//! spins. What a request takes away is out of everybody's reach when it is answered.

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
pub use unit::{ADDRESS_WIDTHS, Behind, Iommu};
