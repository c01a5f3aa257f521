//! Endpoints, their domains, and the effects of requests (`virtio 1.4 §5.13.6`).

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use vm_memory::Permissions;

use super::change::Change;
use super::endpoint::{Attachment, Endpoint};
use super::mappings::{Mappings, Range};
use super::request::Request;
use super::status::Status;
use crate::memory::DmaMapping;
use crate::{DomainState, MappingState};

/// The smallest range that can be mapped, in bytes.
pub(crate) const PAGE: u64 = 4096;
/// The highest domain ID. Each domain has an endpoint in it, so the endpoints limit their number.
pub(crate) const LAST_DOMAIN: u32 = 0xffff;
/// The most mappings of all domains together: a guest must not exhaust the host's memory.
const MOST_MAPPINGS: usize = 1 << 20;

/// A domain.
struct Domain {
    /// `None` for a bypass domain.
    mappings: Option<Arc<RwLock<Mappings>>>,
    /// The endpoints in the domain, at least one.
    endpoints: Vec<Arc<Endpoint>>,
}

/// An endpoint and its domain.
struct Entry {
    endpoint: Arc<Endpoint>,
    domain: Option<u32>,
}

/// Endpoints and domains.
pub(crate) struct Table {
    /// The highest I/O address.
    last_address: u64,
    most_mappings: usize,
    endpoints: BTreeMap<u32, Entry>,
    domains: BTreeMap<u32, Domain>,
    /// The mappings of all domains.
    mappings: usize,
}

impl Table {
    /// Creates a table without endpoints. `last_address` is the highest I/O address.
    pub(crate) fn new(last_address: u64) -> Self {
        let (endpoints, domains, mappings) = (BTreeMap::new(), BTreeMap::new(), 0);
        Self { last_address, most_mappings: MOST_MAPPINGS, endpoints, domains, mappings }
    }

    /// Limits the number of mappings to `most_mappings`.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn with_most_mappings(self, most_mappings: usize) -> Self {
        Self { most_mappings, ..self }
    }

    /// The highest I/O address.
    pub(crate) fn last_address(&self) -> u64 {
        self.last_address
    }

    /// Adds an endpoint; replaces one with the same number.
    pub(crate) fn add(&mut self, endpoint: Arc<Endpoint>) -> Change {
        let change = self.remove(endpoint.id());
        self.endpoints.insert(endpoint.id(), Entry { endpoint, domain: None });
        change
    }

    /// Removes an endpoint with its mappings, without notifying its follower.
    pub(crate) fn remove(&mut self, id: u32) -> Change {
        self.endpoints.get(&id).into_iter().for_each(|entry| entry.endpoint.leave());
        let change = self.leave(id);
        self.endpoints.remove(&id);
        change
    }

    /// The endpoint with this ID.
    pub(crate) fn endpoint(&self, id: u32) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(&id).map(|entry| &entry.endpoint)
    }

    /// Detaches all endpoints, which removes all domains.
    pub(crate) fn reset(&mut self) -> Change {
        let mut detached = Vec::new();
        for entry in self.endpoints.values_mut() {
            if entry.domain.take().is_some() {
                entry.endpoint.attach(Attachment::None);
                detached.push(Arc::clone(&entry.endpoint));
            }
        }
        self.domains.clear();
        self.mappings = 0;
        Change::Attached(detached)
    }

    /// The change for endpoints in no domain after bypass was switched.
    pub(crate) fn bypass_changed(&self) -> Change {
        let unattached = self.endpoints.values().filter(|entry| entry.domain.is_none());
        Change::Attached(unattached.map(|entry| Arc::clone(&entry.endpoint)).collect())
    }

    /// Executes a request. Memory that it unmaps is unreachable when the change is finished.
    ///
    /// # Errors
    ///
    /// The status for the fault. Nothing has changed then.
    pub(crate) fn carry_out(&mut self, request: Request) -> Result<Change, Status> {
        match request {
            Request::Attach { domain, endpoint, bypass } => self.attach(domain, endpoint, bypass),
            Request::Detach { domain, endpoint } => self.detach(domain, endpoint),
            Request::Map { domain, range, target, access } => self.map(domain, range, target, access),
            Request::Unmap { domain, range } => self.unmap(domain, range),
            Request::Probe { endpoint } => self.endpoint(endpoint).map(|_| Change::None).ok_or(Status::NoEntry),
        }
    }

    fn attach(&mut self, domain: u32, id: u32, bypass: bool) -> Result<Change, Status> {
        let entry = self.endpoints.get(&id).ok_or(Status::NoEntry)?;
        if domain > LAST_DOMAIN {
            return Err(Status::Range);
        }
        if self.domains.get(&domain).is_some_and(|domain| domain.mappings.is_none() != bypass) {
            return Err(Status::Invalid);
        }
        if entry.domain == Some(domain) {
            return Ok(Change::None);
        }
        let endpoint = Arc::clone(&entry.endpoint);
        self.forget(id);
        let joined = self
            .domains
            .entry(domain)
            .or_insert_with(|| Domain { mappings: (!bypass).then(Arc::default), endpoints: Vec::new() });
        joined.endpoints.push(Arc::clone(&endpoint));
        let attachment = joined.mappings.clone().map_or(Attachment::Bypass, Attachment::Mapped);
        if let Some(entry) = self.endpoints.get_mut(&id) {
            entry.domain = Some(domain);
        }
        endpoint.attach(attachment);
        Ok(Change::Attached(vec![endpoint]))
    }

    fn detach(&mut self, domain: u32, id: u32) -> Result<Change, Status> {
        let entry = self.endpoints.get(&id).ok_or(Status::NoEntry)?;
        if entry.domain != Some(domain) {
            return Err(Status::Invalid);
        }
        Ok(self.leave(id))
    }

    /// Detaches an endpoint from its domain, if it is in one.
    fn leave(&mut self, id: u32) -> Change {
        let Some(endpoint) = self.forget(id) else { return Change::None };
        endpoint.attach(Attachment::None);
        Change::Attached(vec![endpoint])
    }

    /// The same without updating the endpoint. Removes a domain without endpoints, with its mappings.
    fn forget(&mut self, id: u32) -> Option<Arc<Endpoint>> {
        let entry = self.endpoints.get_mut(&id)?;
        let number = entry.domain.take()?;
        let domain = self.domains.get_mut(&number)?;
        domain.endpoints.retain(|endpoint| endpoint.id() != id);
        if domain.endpoints.is_empty() {
            let lost = domain.mappings.as_ref().map_or(0, |mappings| mappings.read().len());
            self.mappings = self.mappings.saturating_sub(lost);
            self.domains.remove(&number);
        }
        Some(Arc::clone(&entry.endpoint))
    }

    fn map(&mut self, domain: u32, range: Range, target: u64, access: Permissions) -> Result<Change, Status> {
        let domain = self.domains.get(&domain).ok_or(Status::NoEntry)?;
        let mappings = domain.mappings.as_ref().ok_or(Status::Invalid)?;
        let aligned = [range.first, range.last.wrapping_add(1), target].iter().all(|address| address % PAGE == 0);
        let last_target = target.checked_add(range.last - range.first);
        if !aligned || range.last > self.last_address || last_target.is_none() {
            return Err(Status::Range);
        }
        if self.mappings >= self.most_mappings {
            return Err(Status::NoMemory);
        }
        mappings.write().insert(range, target, access)?;
        self.mappings += 1;
        let followed = domain.endpoints.iter().filter(|endpoint| endpoint.follower().is_some());
        let mapping = DmaMapping { first: range.first, last: range.last, target, access };
        Ok(Change::Mapped(mapping, followed.map(Arc::clone).collect()))
    }

    fn unmap(&mut self, domain: u32, range: Range) -> Result<Change, Status> {
        let domain = self.domains.get(&domain).ok_or(Status::NoEntry)?;
        let mappings = domain.mappings.as_ref().ok_or(Status::Invalid)?;
        let removed = mappings.write().remove(range)?;
        if removed.is_empty() {
            return Ok(Change::None);
        }
        self.mappings = self.mappings.saturating_sub(removed.len());
        Ok(Change::Unmapped(removed, domain.endpoints.clone()))
    }

    /// The state of each domain.
    pub(crate) fn domains(&self) -> impl Iterator<Item = DomainState> {
        self.domains.iter().map(|(number, Domain { mappings, endpoints })| DomainState {
            number: *number,
            endpoints: endpoints.iter().map(|endpoint| endpoint.id()).collect(),
            mappings: mappings.as_ref().map(|mappings| mappings.read().iter().map(mapping).collect()),
        })
    }

    /// Numbers of domains and mappings.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.domains.len(), self.mappings)
    }
}

/// The state of a mapping.
fn mapping(DmaMapping { first, last, target, access }: DmaMapping) -> MappingState {
    let (read, write) = (access.allow(Permissions::Read), access.allow(Permissions::Write));
    MappingState { first, last, target, read, write }
}

#[cfg(test)]
mod tests;
