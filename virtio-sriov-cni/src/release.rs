//! Taking a VF back: DEL, GC, and an ADD that failed. Each step succeeds for what is gone.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use vfctl::Roots;
use vm_api::channel::CONTROL_PORT;
use vm_api::config::mac::MacAddress;

use crate::config::Config;
use crate::device::{Rebound, Vf, netlink_in, rebind};
use crate::error::{Code, Error, Result};
use crate::ipam::{self, Order};
use crate::log::Level;
use crate::namespace::Namespace;
use crate::netlink::{Change, Link, Netlink};
use crate::parameters::{Command, Environment};
use crate::state::{Original, Record};
use crate::system::Run;
use crate::transfer::transfer;

/// Runs DEL.
///
/// # Errors
///
/// Errors of the IPAM plugin, and of steps that another DEL may complete. Then the record stays.
pub(crate) fn del(run: &Run<'_>) -> Result<()> {
    let attachment = run.environment.attachment(Command::Del)?;
    let read = run.system.store.read(&run.config.name, &attachment.container, &attachment.interface)?;
    let Some(record) = read else {
        run.system.store.remove(&run.config.name, &attachment.container, &attachment.interface)?;
        return del_again(run);
    };
    if release_locked(run, record)? { Ok(()) } else { del_again(run) }
}

/// Locks the VF of a record and releases it. Returns false if there is no such attachment any longer.
fn release_locked(run: &Run<'_>, mut record: Record) -> Result<bool> {
    let store = &run.system.store;
    loop {
        let _lock = store.lock(&record.vf, run.system.limit)?;
        // An ADD that failed, or another DEL, may have removed it in the meantime, and an ADD may have made another.
        match store.read(&record.network, &record.container, &record.interface)? {
            Some(now) if now.vf != record.vf => record = now,
            Some(now) => return release(run, &now).map(|()| true),
            None => return Ok(false),
        }
    }
}

/// DEL of an attachment that has no record. An IPAM plugin that is missing has not given it an address either.
fn del_again(run: &Run<'_>) -> Result<()> {
    let Some(plugin) = &run.config.ipam else { return Ok(()) };
    if let Err(error) = ipam::find(plugin, run.environment) {
        run.log.warn(&error.message);
        return Ok(());
    }
    ipam::order(plugin, Order::Del, run.environment, run.input)
}

/// Runs GC.
///
/// # Errors
///
/// The first of all errors. All attachments are tried.
pub(crate) fn gc(run: &Run<'_>) -> Result<()> {
    let valid = run.config.valid_attachments()?;
    let mut result = Ok(());
    for record in run.system.store.of_network(&run.config.name)? {
        if valid.iter().any(|(container, interface)| (container, interface) == (&record.container, &record.interface)) {
            continue;
        }
        run.log.write(Level::Info, &format!("{}: not valid, releasing the VF {}", record.describe(), record.vf));
        let described = record.describe();
        let released = release_locked(run, record).map(drop);
        result = result.and(released.map_err(|error| Error { message: format!("{described}: {error}"), ..error }));
    }
    let of_ipam = match &run.config.ipam {
        Some(plugin) => ipam::order(plugin, Order::Gc, run.environment, run.input),
        None => Ok(()),
    };
    result.and(of_ipam)
}

/// Undoes what ADD did, in reverse, and removes the record. The caller has locked the VF.
///
/// # Errors
///
/// The first step that could not be undone and may be later. All else is undone, and the record stays.
pub(crate) fn release(run: &Run<'_>, record: &Record) -> Result<()> {
    undo(run, record, true)
}

/// Does what [`release`] does, and leaves an interface alone that no container was given.
///
/// # Errors
///
/// As [`release`].
pub(crate) fn undo(run: &Run<'_>, record: &Record, given: bool) -> Result<()> {
    let of_ipam = release_addresses(run, record);
    let original = record.link.as_ref().filter(|_| given);
    if original.is_some()
        && let Some(other) = elsewhere(run, record)?
    {
        let what = format!("its interface is in {}, where another program has put it", other.display());
        run.log.warn(&format!("the VF {}: {what}; leaving both alone", record.vf));
        of_ipam?;
        return run.system.store.remove(&record.network, &record.container, &record.interface);
    }
    let of_link = match original {
        Some(original) => take_back(run, record, original),
        None => Ok(()),
    };
    // A container that keeps the interface keeps its VLAN and rate.
    let of_host = if of_link.is_ok() { ungovern(run, &record.vf) } else { Ok(None) };
    if let (Ok(()), Ok(mac), Some(original)) = (&of_link, &of_host, original) {
        restore(run, &Vf::of_record(&run.system.roots, &record.vf), original, *mac);
    }
    of_ipam.and(of_link).and(of_host.map(drop))?;
    run.system.store.remove(&record.network, &record.container, &record.interface)
}

/// The environment of the ADD, for the IPAM plugin.
fn environment_of(environment: &Environment, record: &Record) -> Environment {
    let netns = given_netns(environment, record).cloned();
    let own = BTreeMap::from([
        ("CNI_CONTAINERID".to_string(), record.container.clone()),
        ("CNI_IFNAME".to_string(), record.interface.clone()),
        ("CNI_ARGS".to_string(), record.arguments.clone()),
        ("CNI_NETNS".to_string(), netns.unwrap_or_else(|| record.netns.display().to_string())),
    ]);
    Environment(environment.0.clone().into_iter().chain(own).collect())
}

/// Namespace that the runtime gives for the container of a record: ADD and GC also release those of others.
fn given_netns<'a>(environment: &'a Environment, record: &Record) -> Option<&'a String> {
    let is_its_own = environment.0.get("CNI_CONTAINERID") == Some(&record.container);
    environment.0.get("CNI_NETNS").filter(|path| is_its_own && !path.is_empty())
}

/// Runs DEL of the IPAM plugin.
fn release_addresses(run: &Run<'_>, record: &Record) -> Result<()> {
    let environment = environment_of(run.environment, record);
    // DEL has the configuration of the runtime, with the result of ADD. GC has none of the container.
    let is_del = run.environment.command() == Ok(Command::Del);
    if let Some(plugin) = run.config.ipam.as_ref().filter(|_| is_del) {
        return ipam::order(plugin, Order::Del, &environment, run.input);
    }
    match Config::read(record.config.as_bytes())?.ipam {
        Some(plugin) => ipam::order(&plugin, Order::Del, &environment, record.config.as_bytes()),
        None => Ok(()),
    }
}

/// Returns the interface to the host, under the name that it had there.
///
/// A move would keep what the container made of it: a MACVLAN interface in a second namespace, which would have the
/// next container's traffic, an XDP program, flags. So the driver ends the interface and makes a new one.
fn take_back(run: &Run<'_>, record: &Record, original: &Original) -> Result<()> {
    let vf = Vf::of_record(&run.system.roots, &record.vf);
    let (vf, refused) = match rebind(run.system, &vf.address, &original.driver) {
        Ok(Rebound::Made(vf)) => (vf, None),
        Ok(Rebound::Without) => (vf.clone(), None),
        Ok(Rebound::Refused(error)) => {
            move_back(run, record, &vf, original, &error)?;
            (vf, Some(error))
        }
        // An administrator may have taken it from its driver.
        Err(error) if vf.driver.is_empty() => {
            run.log.warn(&error.message);
            (vf, None)
        }
        Err(error) => return Err(error),
    };
    let netlink = netlink_in(&run.host)?;
    match (vf.link(&netlink, run.system.owner)?, refused) {
        (Some(link), _) => rename(run, &netlink, &link, original),
        (None, Some(error)) => return Err(error),
        (None, None) => run.log.warn(&format!("the VF {} has no interface here", record.vf)),
    }
    Ok(())
}

/// The named namespace of another container that has the interface. None if the host or the record's container has it.
fn elsewhere(run: &Run<'_>, record: &Record) -> Result<Option<PathBuf>> {
    let vf = Vf::of_record(&run.system.roots, &record.vf);
    let has = |namespace: &Namespace| {
        netlink_in(namespace).and_then(|netlink| vf.link(&netlink, run.system.owner)).is_ok_and(|link| link.is_some())
    };
    let given = given_netns(run.environment, record).map(Path::new);
    let opened = given.into_iter().chain([record.netns.as_path()]).filter_map(|path| Namespace::open(path).ok()?);
    let own: Vec<_> = opened.collect();
    if has(&run.host) || own.iter().any(has) {
        return Ok(None);
    }
    let folder = run.system.roots.run.join("netns");
    let paths = match fs::read_dir(&folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(folder.display(), &error)),
    };
    // What cannot be opened is no namespace, or has ended in the meantime.
    let mut others = paths.filter(|path| matches!(Namespace::open(path), Ok(Some(namespace)) if has(&namespace)));
    Ok(others.next())
}

/// Moves the interface to the host as it is, because its driver cannot make a new one, in a container without a
/// writable `/sys` for example. One that is nowhere, or that names keep from moving, is left to the caller.
fn move_back(run: &Run<'_>, record: &Record, vf: &Vf, original: &Original, refused: &Error) -> Result<()> {
    let why = "moving its interface back instead, with all that the container made of it; make /sys writable";
    run.log.warn(&format!("{refused}; {why}"));
    from_container(run, record, vf, original).map(drop)
}

/// Moves the interface from the container to the host. Returns false if the container does not have it.
fn from_container(run: &Run<'_>, record: &Record, vf: &Vf, original: &Original) -> Result<bool> {
    let given = given_netns(run.environment, record);
    let paths = given.map(Path::new).into_iter().chain([record.netns.as_path()]);
    for path in paths {
        let opened = Namespace::open(path).map_err(|error| Error::io(path.display(), &error))?;
        let Some(container) = opened else { continue };
        if container.is(&run.host).unwrap_or(true) || vf.link(&netlink_in(&container)?, run.system.owner)?.is_none() {
            continue;
        }
        return bring_home(run, vf, &container, original).map(|()| true);
    }
    Ok(false)
}

/// Gives an interface on the host the name that it had, without names of the container.
fn rename(run: &Run<'_>, netlink: &Netlink, link: &Link, original: &Original) {
    let foreign: Vec<_> = link.altnames.iter().filter(|name| !original.altnames.contains(name)).cloned().collect();
    let mut changed = netlink.remove_altnames(link.index, &foreign);
    if link.name != original.name {
        let change = Change { name: Some(&original.name), ..Change::default() };
        changed = changed.and(netlink.change(link.index, &change));
    }
    // The host's udev may give it the same name at the same time.
    let has_name = || matches!(netlink.link(&original.name), Ok(Some(now)) if now.index == link.index);
    if let Err(error) = changed
        && !has_name()
    {
        run.log.warn(&format!("the interface {} keeps its names: {}: {error}", link.name, original.name));
    }
}

fn bring_home(run: &Run<'_>, vf: &Vf, container: &Namespace, original: &Original) -> Result<()> {
    let places = (container, &run.host);
    let first = transfer(vf, run.system.owner, places, &original.name, &|_| {});
    let Err(error) = first else { return Ok(()) };
    // Another interface may have taken the name. One of the VF's address is free.
    let name = format!("vf{}", vf.address.chars().filter(char::is_ascii_alphanumeric).collect::<String>());
    run.log.warn(&format!("{error}; naming it {name}"));
    transfer(vf, run.system.owner, places, &name, &|_| {}).map(|_| ())
}

/// Returns the VF to the host's settings. Returns its address then, unless no settings are left: they end with VF
/// Enable, and a guest without a channel cannot have made any.
fn ungovern(run: &Run<'_>, vf: &str) -> Result<Option<MacAddress>> {
    let reset = (run.system.channel)().and_then(|mut channel| channel.reset(vf));
    match reset {
        Ok(state) => Ok(Some(state.mac)),
        Err(error) if error.is(Code::Device) || (error.is(Code::Channel) && !has_channel(&run.system.roots)) => {
            run.log.warn(&format!("the VF {vf} was not reset: {error}"));
            Ok(None)
        }
        // The next container of the VF must not get the settings of this one.
        Err(error) => Err(Error { code: Code::TryAgain as u32, ..error }),
    }
}

/// True if the kernel shows the port of the channel, also if this program cannot open it.
fn has_channel(roots: &Roots) -> bool {
    let ports = fs::read_dir(roots.sys.join("class/virtio-ports"));
    let names = ports.into_iter().flatten().flatten().map(|port| fs::read_to_string(port.path().join("name")));
    names.flatten().any(|name| name.trim_end() == CONTROL_PORT)
}

/// Gives an interface on the host the host's address and the further names that it had, and sets it up if it was.
fn restore(run: &Run<'_>, vf: &Vf, original: &Original, mac: Option<MacAddress>) {
    let link = netlink_in(&run.host).and_then(|netlink| Ok((vf.link(&netlink, run.system.owner)?, netlink)));
    let Ok((Some(link), netlink)) = link else { return };
    for name in original.altnames.iter().filter(|name| !link.altnames.contains(name)) {
        // The host's udev may give them at the same time.
        if let Err(error) = netlink.add_altnames(link.index, std::slice::from_ref(name)) {
            run.log.warn(&format!("interface {}: restoring its name {name}: {error}", link.name));
        }
    }
    let change =
        Change { mac: mac.filter(|mac| Some(*mac) != link.mac), up: original.up && !link.up, ..Change::default() };
    if change.mac.is_none() && !change.up {
        return;
    }
    if let Err(error) = netlink.change(link.index, &change) {
        let Link { name, .. } = link;
        run.log.warn(&format!("interface {name}: restoring its address or state: {error}"));
    }
}
