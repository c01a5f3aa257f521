//! CHECK and STATUS: reading what ADD made, and if it can work.

use crate::add::{open_container, previous};
use crate::device::{Vf, netlink_in};
use crate::error::{Code, Error, Result};
use crate::ipam::{self, Order};
use crate::net::IpNet;
use crate::parameters::Command;
use crate::result::Attached;
use crate::settings::Settings;
use crate::state::Record;
use crate::system::Run;

/// Runs CHECK.
///
/// # Errors
///
/// [`Code::Changed`] with the first difference; those of the IPAM plugin.
pub(crate) fn check(run: &Run<'_>) -> Result<()> {
    let attachment = run.environment.attachment(Command::Check)?;
    let settings = Settings::read(&run.config.keys, run.environment)?;
    let expected = previous(&run.config)?;
    let expected = expected.ok_or_else(|| Error::new(Code::Config, "prevResult: missing; CHECK compares with it"))?;
    let container = open_container(run, &attachment)?;
    let record = run.system.store.read(&run.config.name, &attachment.container, &attachment.interface)?;
    let record = record.ok_or_else(|| changed("there is no ADD of this attachment"))?;
    if record.vf != settings.vf {
        return Err(changed(&format!("deviceID={}: ADD gave it the VF {}", settings.vf, record.vf)));
    }
    let _lock = run.system.store.lock(&record.vf, run.system.limit)?;
    let vf = Vf::find(&run.system.roots, &record.vf)?;
    let state = (run.system.channel)()?.get(&vf.address)?;
    if let Some(difference) = settings.difference(&state) {
        return Err(changed(&difference));
    }
    if record.link.is_some() {
        let netlink = netlink_in(&container)?;
        let failed = |error| Error::io("reading the container's interfaces", &error);
        let link = vf.link(&netlink, run.system.owner)?;
        let link = link.filter(|link| link.name == record.interface);
        let link = link.ok_or_else(|| changed(&format!("interface {}: missing", record.interface)))?;
        if !link.up {
            return Err(changed(&format!("interface {}: down", record.interface)));
        }
        let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        let present = Present {
            mac,
            addresses: netlink.addresses(link.index).map_err(failed)?,
            routes: netlink.routes(link.index).map_err(failed)?.iter().map(|route| route.dst).collect(),
        };
        compare(&record, &expected, &present)?;
    }
    match &run.config.ipam {
        Some(plugin) => ipam::order(plugin, Order::Check, run.environment, run.input),
        None => Ok(()),
    }
}

/// Runs STATUS.
///
/// # Errors
///
/// [`Code::Unavailable`] if the channel does not answer, or the IPAM plugin is missing; those of the IPAM plugin.
pub(crate) fn status(run: &Run<'_>) -> Result<()> {
    let hello = (run.system.channel)().and_then(|mut channel| channel.hello());
    hello.map_err(|error| Error::new(Code::Unavailable, error.message))?;
    let Some(plugin) = &run.config.ipam else { return Ok(()) };
    ipam::find(plugin, run.environment).map_err(|error| Error::new(Code::Unavailable, error.message))?;
    ipam::order(plugin, Order::Status, run.environment, run.input)
}

fn changed(why: &str) -> Error {
    Error::new(Code::Changed, why)
}

/// An interface as it is.
struct Present {
    mac: String,
    addresses: Vec<IpNet>,
    routes: Vec<IpNet>,
}

/// Compares an interface with a result. A later plugin may have changed the result, or added more.
fn compare(record: &Record, expected: &Attached, present: &Present) -> Result<()> {
    let of = |what: String| changed(&format!("interface {}: {what}", record.interface));
    let is_ours = |sandbox: &str, name: &str| !sandbox.is_empty() && name == record.interface;
    let index = expected.interfaces.iter().position(|interface| is_ours(&interface.sandbox, &interface.name));
    let Some((index, interface)) = index.and_then(|index| Some((index, expected.interfaces.get(index)?))) else {
        return Err(of("prevResult does not have it".into()));
    };
    if !interface.mac.is_empty() && !interface.mac.eq_ignore_ascii_case(&present.mac) {
        return Err(of(format!("its address is {}, not {}", present.mac, interface.mac)));
    }
    let ips = expected.ips.iter().filter(|ip| ip.interface == Some(index)).map(|ip| ip.address);
    if let Some(missing) = ips.into_iter().find(|address| !present.addresses.contains(address)) {
        return Err(of(format!("address {missing}: missing")));
    }
    // A default route may be that of another network.
    let routes = expected.routes.iter().filter(|route| !route.dst.is_default()).map(|route| route.dst.network());
    match routes.into_iter().find(|route| !present.routes.contains(route)) {
        Some(missing) => Err(of(format!("route {missing}: missing"))),
        None => Ok(()),
    }
}
