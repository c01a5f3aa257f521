//! From a request to an [`Action`], without any I/O.

use std::os::fd::OwnedFd;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::api::{Action, Failure, FailureKind};
use crate::config::{ConfigError, NetConfig};
use crate::config_later::{self, Object};

/// Where the endpoints are, as in Cloud Hypervisor.
const ROOT: &str = "/api/v1/";

/// A request, of which everything has arrived.
#[derive(Debug)]
pub struct Request<'a> {
    /// The method, as `PUT`.
    pub method: &'a str,
    /// The path, as `/api/v1/vm.info`; without a query.
    pub path: &'a str,
    /// The body; empty if there is none.
    pub body: &'a [u8],
    /// The file descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

/// Why a request is no action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The path has another method: status 405.
    Method {
        /// The method that it has.
        allow: &'static str,
    },
    /// All else.
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
    /// The only method that it has.
    pub method: &'static str,
    /// Its whole path.
    pub path: &'static str,
    take: Take,
}

/// What becomes of a request.
#[derive(Debug)]
enum Take {
    /// An action without a body.
    Bare(fn() -> Action),
    /// An action with a JSON body.
    Body(fn(Value) -> Result<Action, Failure>),
    /// An action with a JSON body and file descriptors.
    Fds(fn(Value, Vec<OwnedFd>) -> Result<Action, Failure>),
    /// Nothing: Cloud Hypervisor has it and this version has not.
    Later(&'static str),
}

const fn get(path: &'static str, action: fn() -> Action) -> Route {
    Route { method: "GET", path, take: Take::Bare(action) }
}

const fn put(path: &'static str, take: Take) -> Route {
    Route { method: "PUT", path, take }
}

/// All endpoints.
pub const ROUTES: &[Route] = &[
    get("/api/v1/vmm.ping", || Action::Ping),
    put("/api/v1/vmm.shutdown", Take::Bare(|| Action::ShutdownVmm)),
    put("/api/v1/vmm.nmi", Take::Bare(|| Action::Nmi)),
    put("/api/v1/vm.create", Take::Body(create)),
    put("/api/v1/vm.boot", Take::Bare(|| Action::Boot)),
    put("/api/v1/vm.delete", Take::Bare(|| Action::Delete)),
    get("/api/v1/vm.info", || Action::Info),
    get("/api/v1/vm.counters", || Action::Counters),
    put("/api/v1/vm.pause", Take::Bare(|| Action::Pause)),
    put("/api/v1/vm.resume", Take::Bare(|| Action::Resume)),
    put("/api/v1/vm.shutdown", Take::Bare(|| Action::Shutdown)),
    put("/api/v1/vm.reboot", Take::Bare(|| Action::Reboot)),
    put("/api/v1/vm.power-button", Take::Bare(|| Action::PowerButton)),
    put("/api/v1/vm.nmi", Take::Bare(|| Action::Nmi)),
    put("/api/v1/vm.add-net", Take::Fds(add_net)),
    put("/api/v1/vm.add-disk", Take::Body(add_disk)),
    put("/api/v1/vm.add-vdpa", Take::Body(|body| Ok(Action::AddVdpa(Box::new(typed(body)?))))),
    put("/api/v1/vm.remove-device", Take::Body(|body| Ok(Action::RemoveDevice(typed(body)?)))),
    put("/api/v1/vm.resize", Take::Body(|body| Ok(Action::Resize(typed(body)?)))),
    put("/api/v1/vm.set-vf", Take::Body(|body| Ok(Action::SetVf(typed(body)?)))),
    put("/api/v1/vm.add-device", Take::Later("VFIO devices are")),
    put("/api/v1/vm.add-user-device", Take::Later("vfio-user devices are")),
    put("/api/v1/vm.add-fs", Take::Later("shared file systems are")),
    put("/api/v1/vm.add-pmem", Take::Later("persistent memory devices are")),
    put("/api/v1/vm.add-vsock", Take::Later("vsock devices are")),
    put("/api/v1/vm.add-generic-vhost-user", Take::Later("generic vhost-user devices are")),
    put("/api/v1/vm.resize-zone", Take::Later("memory zones are")),
    put("/api/v1/vm.resize-disk", Take::Later("disks that change their size are")),
    put("/api/v1/vm.snapshot", Take::Later("snapshots are")),
    put("/api/v1/vm.restore", Take::Later("snapshots are")),
    put("/api/v1/vm.send-migration", Take::Later("live migration is")),
    put("/api/v1/vm.receive-migration", Take::Later("live migration is")),
    put("/api/v1/vm.coredump", Take::Later("core dumps of guests are")),
    get("/metrics", || Action::Metrics),
];

impl Request<'_> {
    /// What the request asks for. Descriptors that are not part of that are closed.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in the words that the client is told.
    pub fn action(self) -> Result<Action, Refusal> {
        let not_found = || Failure::new(FailureKind::NotFound, "Not Found");
        let route = ROUTES.iter().find(|route| route.path == self.path).ok_or_else(not_found)?;
        if route.method != self.method {
            return Err(Refusal::Method { allow: route.method });
        }
        let name = route.path.strip_prefix(ROOT).unwrap_or(route.path);
        if let Take::Later(what) = route.take {
            let what = format!("{name}: {what} not in this version yet");
            return Err(Failure::new(FailureKind::NotImplemented, what).into());
        }
        Ok(self.take(route, name).map_err(|failure| failure.in_context(format!("{name}: the request is not valid")))?)
    }

    fn take(self, route: &Route, name: &str) -> Result<Action, Failure> {
        if !self.fds.is_empty() && !matches!(route.take, Take::Fds(_)) {
            return Err(bad("it came with file descriptors, and only vm.add-net takes them; send none"));
        }
        match route.take {
            Take::Bare(_) if !self.body.is_empty() => Err(bad(format!("{name} takes no body; send none"))),
            Take::Bare(action) => Ok(action()),
            Take::Body(_) | Take::Fds(_) if self.body.is_empty() => {
                Err(bad(format!("{name} takes a JSON object as its body; send one")))
            }
            Take::Body(action) => action(json(self.body)?),
            Take::Fds(action) => action(json(self.body)?, self.fds),
            Take::Later(what) => Err(Failure::new(FailureKind::NotImplemented, what)),
        }
    }
}

fn bad(reason: impl Into<String>) -> Failure {
    Failure::new(FailureKind::BadRequest, reason)
}

fn later(error: ConfigError) -> Failure {
    bad(error.to_string())
}

fn json(body: &[u8]) -> Result<Value, Failure> {
    serde_json::from_slice(body).map_err(|error| bad(format!("the body is not JSON: {error}")))
}

/// The typed form of `body`, as far as there is nothing left of later versions in it.
fn typed<T: DeserializeOwned>(body: Value) -> Result<T, Failure> {
    if !body.is_object() {
        return Err(bad("the body is JSON, but not an object"));
    }
    serde_path_to_error::deserialize(body).map_err(|error| match error.path().to_string().as_str() {
        "." => bad(error.inner().to_string()),
        path => bad(format!("{path}: {}", error.inner())),
    })
}

fn stripped<T: DeserializeOwned>(mut body: Value, object: &Object) -> Result<T, Failure> {
    object.strip(&mut body, "").map_err(later)?;
    typed(body)
}

fn create(body: Value) -> Result<Action, Failure> {
    let config: crate::config::VmConfig = stripped(body, &config_later::VM)?;
    for (index, net) in config.net.iter().enumerate() {
        if !net.fds.is_empty() {
            return Err(numbers_of_fds(
                &format!("net[{index}].fds"),
                "add the NIC by vm.add-net, with its descriptors",
            ));
        }
        check_vf_fds(net, &format!("net[{index}]."))?;
    }
    Ok(Action::Create(Box::new(config)))
}

/// The numbers that the body has for descriptors are the client's, and mean nothing here: what counts are those that came.
fn add_net(body: Value, fds: Vec<OwnedFd>) -> Result<Action, Failure> {
    let mut config: NetConfig = typed(body)?;
    check_vf_fds(&config, "")?;
    if !config.fds.is_empty() && fds.is_empty() {
        return Err(numbers_of_fds("fds", "send the descriptors with the request (SCM_RIGHTS)"));
    }
    config.fds.clear();
    Ok(Action::AddNet(Box::new(config), fds))
}

fn check_vf_fds(net: &NetConfig, path: &str) -> Result<(), Failure> {
    match net.vfs.iter().position(|vf| !vf.fds.is_empty()) {
        Some(index) => Err(numbers_of_fds(&format!("{path}vfs[{index}].fds"), "name the VF's tap instead")),
        None => Ok(()),
    }
}

fn numbers_of_fds(path: &str, remedy: &str) -> Failure {
    bad(format!("{path}: numbers of a client's descriptors mean nothing to this program; {remedy}"))
}

fn add_disk(body: Value) -> Result<Action, Failure> {
    Ok(Action::AddDisk(Box::new(stripped(body, &config_later::DISK)?)))
}
