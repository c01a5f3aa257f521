//! The saved state of an IOMMU.

use vm_memory::Permissions;

use super::mappings::Range;
use super::request::Request;
use super::status::Status;
use super::unit::Iommu;
use crate::{DeviceSpecific, DomainState, IommuState, MappingState, StateError};

impl Iommu {
    /// The state, or the power-on state.
    pub(super) fn save(&self) -> DeviceSpecific {
        let (bypass, table) = (self.bypass(), self.table.lock());
        let domains: Vec<_> = table.domains().collect();
        if bypass && domains.is_empty() {
            return DeviceSpecific::PowerOn;
        }
        DeviceSpecific::Iommu(IommuState { bypass, domains })
    }

    /// Restores an IOMMU with the same endpoints to `state`, as a driver would.
    ///
    /// # Errors
    ///
    /// Fails if no driver could have produced the state. The unit is in its power-on state then.
    pub(super) fn restore(&self, state: &IommuState) -> Result<(), StateError> {
        self.power_on();
        self.set_bypass(state.bypass);
        let restored = state.domains.iter().try_for_each(|domain| self.restore_domain(domain));
        restored.map_err(|_| {
            self.power_on();
            StateError::Value("an IOMMU's domains")
        })
    }

    fn restore_domain(&self, domain: &DomainState) -> Result<(), Status> {
        let DomainState { number, endpoints, mappings } = domain;
        for endpoint in endpoints {
            let bypass = mappings.is_none();
            self.carry_out(Request::Attach { domain: *number, endpoint: *endpoint, bypass })?;
        }
        for MappingState { first, last, target, read, write } in mappings.iter().flatten().copied() {
            let access = match (read, write) {
                (true, true) => Permissions::ReadWrite,
                (true, false) => Permissions::Read,
                (false, true) => Permissions::Write,
                (false, false) => Permissions::No,
            };
            if first > last {
                return Err(Status::Range);
            }
            self.carry_out(Request::Map { domain: *number, range: Range { first, last }, target, access })?;
        }
        Ok(())
    }
}
