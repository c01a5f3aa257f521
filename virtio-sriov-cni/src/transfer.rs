//! Moving an interface between namespaces.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::device::{Vf, netlink_in};
use crate::error::{Code, Error, Result};
use crate::namespace::Namespace;
use crate::netlink::{Change, Link, Netlink};
use crate::system::Step;

/// Moves an interface into a namespace under a new name.
///
/// It gets the name in a temporary namespace: the name may be taken where it comes from, its old name may be taken
/// where it goes, and udev of the host, which names what appears, does not see the change. There it also loses its
/// further names, one of which may be taken where it goes; those that a container gives it, for that purpose. If the
/// plugin is killed in between, the namespace ends, and Linux returns the interface to the host.
///
/// # Errors
///
/// [`Code::Interface`], with the name that is taken for example. Then the interface is in `from`, or, if it could not
/// return, in the host's namespace.
pub(crate) fn transfer(
    vf: &Vf,
    owner: fn(&Link) -> Option<String>,
    (from, to): (&Namespace, &Namespace),
    name: &str,
    step: &dyn Fn(Step),
) -> Result<Link> {
    let failed = |what: &str, error: &io::Error| {
        Error::new(Code::Interface, format!("interface {name} of the VF {}: {what}: {error}", vf.address))
    };
    let missing = || Error::new(Code::Device, format!("the interface of the VF {} is gone", vf.address));
    let between = Namespace::temporary().map_err(|error| failed("making a namespace", &error))?;
    let (netlink, outside) = (netlink_in(&between)?, netlink_in(from)?);
    let link = vf.link(&outside, owner)?.ok_or_else(missing)?;
    send(&outside, link.index, &between).map_err(|error| failed("moving it", &error))?;
    step(Step::Temporary);
    let arrived = vf.link(&netlink, owner)?.ok_or_else(missing)?;
    let index = arrived.index;
    let moved = netlink.remove_altnames(index, &arrived.altnames).and_then(|()| {
        netlink.change(index, &Change { name: Some(name), ..Change::default() })?;
        step(Step::Renamed);
        send(&netlink, index, to)
    });
    if let Err(error) = moved {
        // Back, with its name.
        let back = Change { name: Some(&link.name), ..Change::default() };
        let returned = netlink.change(index, &back).and_then(|()| send(&netlink, index, from));
        returned.map_err(|error| failed("returning it", &error))?;
        let taken = error.raw_os_error() == Some(Errno::EXIST.raw_os_error());
        return Err(failed(if taken { "the name is taken" } else { "moving it" }, &error));
    }
    vf.link(&netlink_in(to)?, owner)?.ok_or_else(missing)
}

fn send(netlink: &Netlink, index: u32, to: &Namespace) -> io::Result<()> {
    netlink.change(index, &Change { netns: Some(to.as_fd()), ..Change::default() })
}
