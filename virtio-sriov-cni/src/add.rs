//! ADD: gives a container a VF.

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;

use rustix::io::Errno;
use serde_json::{Map, Value};
use vm_api::channel::VfState;
use vm_api::config::mac::MacAddress;

use crate::announce::announce;
use crate::config::Config;
use crate::device::{Vf, netlink_in};
use crate::error::{Code, Error, Result};
use crate::ipam;
use crate::log::Level;
use crate::namespace::Namespace;
use crate::netlink::{Change, Link};
use crate::parameters::{Attachment, Command};
use crate::release::{release, undo};
use crate::result::{Attached, Interface, Ip, Route};
use crate::settings::Settings;
use crate::state::{Original, Record};
use crate::system::{Run, Step};
use crate::transfer::transfer;

/// Runs ADD. Returns its result as JSON.
///
/// # Errors
///
/// All codes except [`Code::Unavailable`]. Then nothing is left of the attachment, except its record if undoing failed,
/// too: DEL completes it.
pub(crate) fn add(run: &Run<'_>) -> Result<String> {
    let attachment = run.environment.attachment(Command::Add)?;
    let settings = Settings::read(&run.config.keys, run.environment)?;
    let previous = previous(&run.config)?;
    if let Some(plugin) = &run.config.ipam {
        ipam::find(plugin, run.environment)?;
    }
    let container = open_container(run, &attachment)?;
    let vf = Vf::find(&run.system.roots, &settings.vf)?;
    let _lock = run.system.store.lock(&vf.address, run.system.limit)?;
    refuse_taken(run, &attachment, &vf)?;
    // A DEL that had the lock has made another device below it.
    let vf = Vf::find(&run.system.roots, &settings.vf)?;
    let link = original(run, &container, &attachment, &vf)?;
    let record = Record {
        network: run.config.name.clone(),
        container: attachment.container.clone(),
        interface: attachment.interface.clone(),
        netns: attachment.netns.clone().unwrap_or_default(),
        vf: vf.address.clone(),
        link,
        arguments: run.environment.0.get("CNI_ARGS").cloned().unwrap_or_default(),
        config: String::from_utf8_lossy(run.input).into_owned(),
    };
    run.system.store.write(&record)?;
    let adding = Adding { run, record: &record, vf: &vf, container: &container, given: Cell::new(false) };
    adding
        .build(&settings)
        .map(|(interface, ipam)| Attached::after(previous, interface, &ipam).to_json(run.config.version).to_string())
        .inspect_err(|error| {
            run.log.write(Level::Debug, &format!("undoing: {error}"));
            if let Err(also) = undo(run, &record, adding.given.get()) {
                run.log.write(Level::Error, &format!("undoing failed, DEL will try again: {also}"));
            }
        })
}

/// Result of the plugin before this one in the chain.
pub(crate) fn previous(config: &Config) -> Result<Option<Attached>> {
    let read = config.previous.clone().map(serde_json::from_value).transpose();
    read.map_err(|error| Error::new(Code::Config, format!("prevResult: {error}")))
}

/// The namespace of the container, which is not that of the host.
pub(crate) fn open_container(run: &Run<'_>, attachment: &Attachment) -> Result<Namespace> {
    let path = attachment.netns.clone().unwrap_or_default();
    let refusal = |why: &str| Error::new(Code::Environment, format!("CNI_NETNS={}: {why}", path.display()));
    let opened = Namespace::open(&path).map_err(|error| refusal(&error.to_string()))?;
    let container = opened.ok_or_else(|| refusal("there is no network namespace; give the path of one"))?;
    let is_host = container.is(&run.host).map_err(|error| refusal(&error.to_string()))?;
    if is_host { Err(refusal("this is the host's namespace; give the container's")) } else { Ok(container) }
}

/// Refuses a VF that another container has, and a second ADD. Both end with a DEL. A container that is gone loses it.
fn refuse_taken(run: &Run<'_>, attachment: &Attachment, vf: &Vf) -> Result<()> {
    let store = &run.system.store;
    let second = store.read(&run.config.name, &attachment.container, &attachment.interface)?;
    if let Some(record) = second {
        let message = format!("{}: has the VF {} since an earlier ADD; DEL it first", record.describe(), record.vf);
        return Err(Error::new(Code::TryAgain, message));
    }
    let Some(holder) = store.holder(&vf.address, &|line| run.log.warn(line))? else { return Ok(()) };
    // A runtime that has lost a container never runs its DEL.
    if holder.container != attachment.container && matches!(Namespace::open(&holder.netns), Ok(None)) {
        let what = "its namespace is gone, releasing the VF";
        run.log.warn(&format!("{}: {what} {}", holder.describe(), holder.vf));
        return release(run, &holder);
    }
    let message = format!("deviceID={}: {} has it; DEL that first", vf.address, holder.describe());
    Err(Error::new(Code::TryAgain, message))
}

/// The interface of the VF as the host has it; none with a driver for user space.
fn original(run: &Run<'_>, container: &Namespace, attachment: &Attachment, vf: &Vf) -> Result<Option<Original>> {
    let inside = netlink_in(container)?.link(&attachment.interface);
    if inside.map_err(|error| Error::io("reading the container's interfaces", &error))?.is_some() {
        let message = format!("CNI_IFNAME={}: the container has such an interface", attachment.interface);
        return Err(Error::new(Code::Interface, message));
    }
    if vf.in_user_space {
        return Ok(None);
    }
    let link = vf.link(&netlink_in(&run.host)?, run.system.owner)?.ok_or_else(|| {
        let why = "its interface is not in the host's namespace; bind virtio-pci to it, or end what has it";
        Error::new(Code::Device, format!("deviceID={}: {why}", vf.address))
    })?;
    let Link { name, up, altnames, .. } = link;
    Ok(Some(Original { name, up, altnames, driver: vf.driver.clone() }))
}

/// An ADD whose record is written.
struct Adding<'a> {
    run: &'a Run<'a>,
    record: &'a Record,
    vf: &'a Vf,
    container: &'a Namespace,
    /// True once the interface may have left the host.
    given: Cell<bool>,
}

impl Adding<'_> {
    /// Makes all changes.
    fn build(&self, settings: &Settings) -> Result<(Interface, Attached)> {
        let step = self.run.system.step;
        step(Step::Recorded);
        let state = self.govern(settings)?;
        step(Step::Governed);
        let link = if self.vf.in_user_space { None } else { Some(self.give(settings)?) };
        let ipam = match &self.run.config.ipam {
            Some(plugin) => ipam::add(plugin, self.run.environment, self.run.input)?,
            None => Attached::default(),
        };
        step(Step::Allocated);
        let ipam = Attached { dns: ipam.dns.or_else(|| self.run.config.dns.clone()), ..ipam };
        if let Some(link) = &link {
            self.number(link, &ipam)?;
        }
        let mac = link.as_ref().and_then(|link| link.mac).unwrap_or(state.mac);
        let interface = Interface {
            name: self.record.interface.clone(),
            mac: mac.to_string(),
            mtu: link.map(|link| link.mtu),
            sandbox: self.record.netns.display().to_string(),
            pci: self.vf.address.clone(),
            others: Map::<String, Value>::new(),
        };
        Ok((interface, ipam))
    }

    /// Sets the VF, starting from the host's settings.
    fn govern(&self, settings: &Settings) -> Result<VfState> {
        let mut channel = (self.run.system.channel)()?;
        let mut state = channel.get(&self.vf.address)?;
        if !state.set.is_empty() {
            self.run.log.warn(&format!("{}: had settings of {}", self.vf.address, state.set.join(", ")));
            state = channel.reset(&self.vf.address)?;
        }
        if let Some(set) = settings.changes(&state) {
            state = channel.set(&set)?;
        }
        match settings.difference(&state) {
            Some(difference) => Err(Error::new(Code::Denied, difference)),
            None => Ok(state),
        }
    }

    /// Moves the interface into the container, with its address, and sets it up.
    fn give(&self, settings: &Settings) -> Result<Link> {
        let (run, step) = (self.run, self.run.system.step);
        let places = (&run.host, self.container);
        self.given.set(true);
        let link = transfer(self.vf, run.system.owner, places, &self.record.interface, step)?;
        step(Step::Moved);
        let netlink = netlink_in(self.container)?;
        if let Some(mac) = settings.mac.filter(|mac| Some(*mac) != link.mac) {
            let changed = netlink.change(link.index, &Change { mac: Some(mac), ..Change::default() });
            changed.map_err(|error| self.failed(&format!("setting its address {mac}"), &error))?;
        }
        step(Step::Addressed);
        let up = netlink.change(link.index, &Change { up: true, ..Change::default() });
        up.map_err(|error| self.failed("setting it up", &error))?;
        step(Step::Up);
        let mac: Option<MacAddress> = settings.mac.or(link.mac);
        Ok(Link { mac, ..link })
    }

    /// Gives the interface its addresses and routes, and announces the addresses.
    fn number(&self, link: &Link, ipam: &Attached) -> Result<()> {
        let step = self.run.system.step;
        let netlink = netlink_in(self.container)?;
        if ipam.ips.iter().any(|ip| ip.address.address.is_ipv6()) {
            self.enable_ipv6();
        }
        for ip in &ipam.ips {
            let added = netlink.add_address(link.index, ip.address);
            added.map_err(|error| self.failed(&format!("adding the address {}", ip.address), &error))?;
        }
        step(Step::Numbered);
        for route in &ipam.routes {
            self.route(&netlink, link, ipam, route)?;
        }
        step(Step::Routed);
        let addresses: Vec<_> = ipam.ips.iter().map(|Ip { address, .. }| address.address).collect();
        let announced = self.container.inside(|| announce(link, &addresses)).and_then(|announced| announced);
        if let Err(error) = announced {
            // Neighbours learn the addresses from the first packets, too.
            self.run.log.warn(&format!("announcing addresses of {}: {error}", self.record.interface));
        }
        step(Step::Announced);
        Ok(())
    }

    fn route(&self, netlink: &crate::netlink::Netlink, link: &Link, ipam: &Attached, route: &Route) -> Result<()> {
        match netlink.add_route(link.index, route, ipam.gateway(route)) {
            // Another network may have it already (`CNI 0.4.0, IP Allocation`).
            Err(error) if route.dst.is_default() && error.kind() == ErrorKind::AlreadyExists => {
                self.run.log.warn(&format!("route {}: the container has a default route already", route.dst));
                Ok(())
            }
            Err(error) if error.raw_os_error() == Some(Errno::NETUNREACH.raw_os_error()) => {
                Err(self.failed(&format!("adding the route {}: no address reaches its gateway", route.dst), &error))
            }
            added => added.map_err(|error| self.failed(&format!("adding the route {}", route.dst), &error)),
        }
    }

    /// Runtimes may disable IPv6 in a container, without which it takes no address.
    fn enable_ipv6(&self) {
        let path = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.record.interface);
        let enable = || match fs::read_to_string(&path) {
            Ok(text) if text.trim() == "0" => Ok(()),
            _ => fs::write(&path, "0"),
        };
        if let Err(error) = self.container.inside(enable).and_then(|enabled| enabled) {
            self.run.log.warn(&format!("{path}: {error}"));
        }
    }

    fn failed(&self, what: &str, error: &std::io::Error) -> Error {
        Error::new(Code::Interface, format!("interface {}: {what}: {error}", self.record.interface))
    }
}
