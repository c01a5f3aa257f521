//! The common keys of plain devices.

use std::collections::HashSet;

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::check_id;

use crate::config::capacity::check_slot;
use crate::config::device::DevicePlan;
use crate::config::subject::Subject;

/// The keys for a device's name and place. The segment is checked with the whole plan.
pub(crate) struct CommonKeys<'a> {
    /// Name, if one is given.
    pub id: Option<&'a str>,
    /// Segment, and device number on bus 0 there, if one is given.
    pub slot: (u16, Option<u8>),
}

impl CommonKeys<'_> {
    /// Checks the keys. `subject` is the device.
    ///
    /// # Errors
    ///
    /// Fails with the first mistake.
    pub(crate) fn check(&self, flag: &str, subject: &Subject) -> Result<(), ConfigError> {
        if let Some(id) = self.id {
            check_id(id).map_err(|problem| ConfigError::new(format!("{flag} id={id}"), problem))?;
        }
        let (segment, slot) = self.slot;
        slot.map_or(Ok(()), |slot| check_slot((segment, 0), slot, subject))
    }
}

/// Checks that no two devices of one kind share an id. All kinds are compared later.
///
/// # Errors
///
/// Fails if two devices have the same id.
pub(crate) fn check_ids(flag: &str, plans: &[DevicePlan]) -> Result<(), ConfigError> {
    let mut ids = HashSet::new();
    match plans.iter().find(|plan| !ids.insert(&plan.id)) {
        Some(plan) => {
            let (what, user) = ("this id".to_string(), "another device".to_string());
            let remedy = "give each device its own".to_string();
            Err(ConfigError::new(format!("{flag} id={}", plan.id), Problem::InUse { what, user, remedy }))
        }
        None => Ok(()),
    }
}
