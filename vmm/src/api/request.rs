//! Turns a request into an [`Action`], without I/O.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::LazyLock;

use serde::de::DeserializeOwned;
use serde_json::Value;
use vm_api::body::SetVf;
use vm_api::config::kinds::{JsonError, KINDS, Kind};
use vm_api::document::{self, DocumentError};
use vm_api::migration::ReceiveMigration;
use vm_api::typed;

use crate::api::{Action, Failure, NewDevice};
use crate::config::json::drop_nulls;
use crate::config::unsupported::{self, Object};
use crate::config::{DeviceConfig, NetConfig, RestoreConfig, RestoredBackend, RestoredNet};
use crate::error_kind::ErrorKind;

/// The path prefix of the endpoints, as in Cloud Hypervisor.
const ROOT: &str = "/api/v1/";

/// A complete HTTP request.
#[derive(Debug)]
pub struct Request<'a> {
    /// The method, such as `PUT`.
    pub method: &'a str,
    /// The path, such as `/api/v1/vm.info`; without a query.
    pub path: &'a str,
    /// The body; may be empty.
    pub body: &'a [u8],
    /// The file descriptors of the request.
    pub fds: Vec<OwnedFd>,
}

/// Reason why a request does not become an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The endpoint has another method: status 405.
    Method {
        /// The endpoint's method.
        allow: &'static str,
    },
    /// Any other failure.
    Failure(Failure),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// An endpoint.
#[derive(Debug)]
pub struct Route {
    /// The only method.
    pub method: &'static str,
    /// Full path.
    pub path: &'static str,
    /// `None` for an endpoint of Cloud Hypervisor that is not supported yet.
    take: Option<Take>,
}

/// Handling of a request to an endpoint.
#[derive(Debug)]
enum Take {
    /// An action without a body.
    Bare(fn() -> Action),
    /// An action with a JSON body, or without one.
    Optional(fn(Value) -> Result<Action, Failure>),
    /// An action with a JSON body.
    Body(fn(Value) -> Result<Action, Failure>),
    /// An action with a JSON body and file descriptors.
    Fds(fn(Value, Vec<OwnedFd>) -> Result<Action, Failure>),
    /// The addition of a device that is described by a JSON body alone.
    Device(&'static Kind),
}

const fn get(path: &'static str, action: fn() -> Action) -> Route {
    Route { method: "GET", path, take: Some(Take::Bare(action)) }
}

const fn put(path: &'static str, take: Take) -> Route {
    Route { method: "PUT", path, take: Some(take) }
}

const fn later(path: &'static str) -> Route {
    Route { method: "PUT", path, take: None }
}

/// All endpoints.
pub static ROUTES: LazyLock<Vec<Route>> = LazyLock::new(|| {
    let without_fds = KINDS.iter().filter(|kind| !kind.has_fds);
    let added = without_fds.map(|kind| put(kind.texts.path, Take::Device(kind)));
    OWN_ROUTES.into_iter().chain(added).collect()
});

/// The endpoints other than those of devices without descriptors.
const OWN_ROUTES: [Route; 31] = [
    get("/api/v1/vmm.ping", || Action::Ping),
    put("/api/v1/vmm.shutdown", Take::Bare(|| Action::ShutdownVmm)),
    put("/api/v1/vmm.nmi", Take::Bare(|| Action::Nmi)),
    put("/api/v1/vm.create", Take::Body(create)),
    put("/api/v1/vm.boot", Take::Bare(|| Action::Boot)),
    put("/api/v1/vm.delete", Take::Bare(|| Action::Delete)),
    get("/api/v1/vm.info", || Action::Info),
    get("/api/v1/vm.counters", || Action::Counters),
    put("/api/v1/vm.pause", Take::Bare(|| Action::Pause)),
    put("/api/v1/vm.resume", Take::Optional(resume)),
    put("/api/v1/vm.shutdown", Take::Bare(|| Action::Shutdown)),
    put("/api/v1/vm.reboot", Take::Bare(|| Action::Reboot)),
    put("/api/v1/vm.power-button", Take::Bare(|| Action::PowerButton)),
    put("/api/v1/vm.nmi", Take::Bare(|| Action::Nmi)),
    put("/api/v1/vm.add-net", Take::Fds(add_net)),
    put("/api/v1/vm.add-device", Take::Fds(add_device)),
    put("/api/v1/vm.send-migration", Take::Body(|body| Ok(Action::SendMigration(Box::new(typed(body)?))))),
    put("/api/v1/vm.receive-migration", Take::Fds(receive_migration)),
    put("/api/v1/vm.cancel-migration", Take::Bare(|| Action::CancelMigration)),
    get("/api/v1/vm.migration-progress", || Action::MigrationProgress),
    put("/api/v1/vm.remove-device", Take::Body(|body| Ok(Action::RemoveDevice(typed(body)?)))),
    put("/api/v1/vm.resize", Take::Body(|body| Ok(Action::Resize(typed(body)?)))),
    put("/api/v1/vm.resize-zone", Take::Body(|body| Ok(Action::ResizeZone(typed(body)?)))),
    put("/api/v1/vm.resize-disk", Take::Body(|body| Ok(Action::ResizeDisk(typed(body)?)))),
    put("/api/v1/vm.set-vf", Take::Fds(set_vf)),
    put("/api/v1/vm.inject-fault", Take::Body(|body| Ok(Action::InjectFault(typed(body)?)))),
    put("/api/v1/vm.snapshot", Take::Body(|body| Ok(Action::Snapshot(typed(body)?)))),
    put("/api/v1/vm.restore", Take::Fds(restore)),
    later("/api/v1/vm.add-user-device"),
    later("/api/v1/vm.coredump"),
    get("/metrics", || Action::Metrics),
];

impl Request<'_> {
    /// The action of the request. Descriptors that the action does not use are closed.
    ///
    /// # Errors
    ///
    /// Fails if the request is not valid, with the answer for the client.
    pub fn action(self) -> Result<Action, Refusal> {
        let not_found = || Failure::new(ErrorKind::NotFound, "Not Found");
        let route = ROUTES.iter().find(|route| route.path == self.path).ok_or_else(not_found)?;
        if route.method != self.method {
            return Err(Refusal::Method { allow: route.method });
        }
        let name = route.path.strip_prefix(ROOT).unwrap_or(route.path);
        let Some(take) = &route.take else {
            let what = format!("{name}: {} not supported yet", unsupported::endpoint(name).unwrap_or("it is"));
            return Err(Failure::new(ErrorKind::Unsupported, what).into());
        };
        Ok(self.take(take, name).map_err(|failure| failure.in_context(format!("{name}: the request is not valid")))?)
    }

    /// True if there is no body, or null, which some clients send for an omitted body.
    fn has_no_body(&self) -> bool {
        matches!(self.body.trim_ascii(), b"" | b"null")
    }

    fn take(self, take: &Take, name: &str) -> Result<Action, Failure> {
        if !self.fds.is_empty() && !matches!(take, Take::Fds(_)) {
            return Err(bad(
                "it came with file descriptors, which only vm.add-net, vm.add-device, vm.set-vf, vm.restore and \
                 vm.receive-migration take; send none",
            ));
        }
        match take {
            Take::Bare(_) if !self.has_no_body() => Err(bad(format!("{name} takes no body; send none"))),
            Take::Bare(action) => Ok(action()),
            Take::Body(_) | Take::Fds(_) | Take::Device(_) if self.body.is_empty() => {
                Err(bad(format!("{name} takes a JSON object as its body; send one")))
            }
            Take::Optional(action) if self.has_no_body() => action(Value::Object(serde_json::Map::new())),
            Take::Optional(action) | Take::Body(action) => action(json(self.body)?),
            Take::Fds(action) => action(json(self.body)?, self.fds),
            Take::Device(kind) => add(json(self.body)?, kind),
        }
    }
}

fn bad(reason: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Invalid, reason)
}

fn json(body: &[u8]) -> Result<Value, Failure> {
    let mut body = document::read(body).map_err(|error| match error {
        DocumentError::Syntax(_) => bad(format!("the body is {error}")),
        DocumentError::Content { .. } => bad(error.to_string()),
    })?;
    drop_nulls(&mut body);
    Ok(body)
}

/// The typed form of `body`.
fn typed<T: DeserializeOwned>(body: Value) -> Result<T, Failure> {
    read(body, typed::typed)
}

/// The body as `typed` reads it.
fn read<T>(body: Value, typed: fn(Value) -> Result<T, JsonError>) -> Result<T, Failure> {
    if !body.is_object() {
        return Err(bad("the body is JSON, but not an object"));
    }
    typed(body).map_err(|error| match error.path().to_string().as_str() {
        "." => bad(error.inner().to_string()),
        path => bad(format!("{path}: {}", error.inner())),
    })
}

fn stripped<T: DeserializeOwned>(mut body: Value, object: Object) -> Result<T, Failure> {
    object.strip(&mut body, "").map_err(|error| bad(error.to_string()))?;
    typed(body)
}

fn create(body: Value) -> Result<Action, Failure> {
    let has_payload = body.get("payload").is_some_and(|payload| !payload.is_null());
    let config: crate::config::VmConfig = stripped(body, Object::Vm)?;
    for (index, net) in config.net.iter().enumerate() {
        if !net.backend.fds.is_empty() {
            return Err(numbers_of_fds(
                &format!("net[{index}].fds"),
                "add the NIC with vm.add-net, and send its descriptors",
            ));
        }
        check_vf_fds(net, &format!("net[{index}]."))?;
    }
    if let Some(index) = config.devices.iter().position(|device| device.fd.is_some()) {
        return Err(numbers_of_fds(
            &format!("devices[{index}].fd"),
            "add the device with vm.add-device, and send its descriptor",
        ));
    }
    if !has_payload {
        return Err(bad("payload: is required; give what the VM boots, such as {\"kernel\": \"/boot/vmlinux\"}"));
    }
    Ok(Action::Create(Box::new(config)))
}

/// Adds a device that is described by its body alone.
fn add(mut body: Value, kind: &Kind) -> Result<Action, Failure> {
    kind.object.strip(&mut body, "").map_err(|error| bad(error.to_string()))?;
    Ok(Action::Add(NewDevice::Other(read(body, kind.from_json)?)))
}

/// Descriptor numbers in the body are the client's, and mean nothing in this process. Only the received descriptors
/// count.
fn add_net(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let mut config: NetConfig = stripped(body, Object::Net)?;
    check_vf_fds(&config, "")?;
    if !config.backend.fds.is_empty() && fds.is_empty() {
        return Err(numbers_of_fds("fds", "send the descriptors with the request (SCM_RIGHTS)"));
    }
    config.backend.fds.clear();
    Ok(Action::Add(NewDevice::Net(Box::new(config), fds)))
}

/// As [`add_net`], with the device's file, if the device is not named by its path. The configuration gets the number
/// here.
fn add_device(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let mut config: DeviceConfig = stripped(body, Object::Device)?;
    if config.fd.take().is_some() && fds.is_empty() {
        return Err(numbers_of_fds("fd", "send the descriptor with the request (SCM_RIGHTS)"));
    }
    match fds.len() {
        0 | 1 => {
            config.fd = fds.first().map(AsRawFd::as_raw_fd);
            Ok(Action::Add(NewDevice::Host(Box::new(config), fds)))
        }
        came => Err(bad(format!("{came} descriptors came with it (SCM_RIGHTS), and a device has one file; send one"))),
    }
}

fn check_vf_fds(net: &NetConfig, path: &str) -> Result<(), Failure> {
    match net.vfs.iter().position(|vf| !vf.backend.fds.is_empty()) {
        Some(index) => Err(numbers_of_fds(&format!("{path}vfs[{index}].fds"), "name the VF's tap instead")),
        None => Ok(()),
    }
}

fn numbers_of_fds(path: &str, remedy: &str) -> Failure {
    bad(format!("{path}: a client's descriptor numbers mean nothing in this process; {remedy}"))
}

fn set_vf(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let change: SetVf = stripped(body, Object::Vf)?;
    let wanted = change.num_fds.unwrap_or(0);
    if wanted != fds.len() {
        let came = fds.len();
        let line =
            format!("num_fds: {wanted} descriptors are announced, and {came} came with the request (SCM_RIGHTS)");
        return Err(Failure::new(ErrorKind::Invalid, line));
    }
    Ok(Action::SetVf(Box::new(change), fds))
}

/// The received descriptors are those of `net_fds`, in their order, and then those of `backends`.
fn restore(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let mut config: RestoreConfig = typed(body)?;
    give_numbers(&mut config.net_fds, &mut config.backends, &fds)?;
    Ok(Action::Restore(Box::new(config), fds))
}

fn receive_migration(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let mut config: ReceiveMigration = typed(body)?;
    give_numbers(&mut config.net_fds, &mut config.backends, &fds)?;
    Ok(Action::ReceiveMigration(Box::new(config), fds))
}

/// Gives the functions the numbers of their received descriptors, in order.
fn give_numbers(nets: &mut [RestoredNet], backends: &mut [RestoredBackend], came: &[OwnedFd]) -> Result<(), Failure> {
    let mut numbers = came.iter().map(AsRawFd::as_raw_fd);
    let mut wanted = 0;
    let nets = nets.iter_mut().map(|net| (net.num_fds, &mut net.fds));
    let backends = backends.iter_mut().map(|backend| (backend.num_fds.unwrap_or(0), &mut backend.fds));
    for (count, fds) in nets.chain(backends) {
        // The client's numbers mean nothing in this process.
        *fds = numbers.by_ref().take(count).collect();
        wanted = count.saturating_add(wanted);
    }
    if wanted == came.len() {
        return Ok(());
    }
    let came = came.len();
    Err(bad(format!(
        "net_fds, backends: {wanted} descriptors are announced (num_fds), and {came} came with the request \
         (SCM_RIGHTS); send as many"
    )))
}

fn resume(body: Value) -> Result<Action, Failure> {
    Ok(Action::Resume(typed(body)?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn exactly_the_endpoints_listed_as_unsupported_are_refused() {
        let later = ROUTES.iter().filter(|route| route.take.is_none());
        let names: BTreeSet<_> = later.map(|route| route.path.trim_start_matches(ROOT)).collect();
        assert_eq!(names, unsupported::endpoints().collect());
    }
}
