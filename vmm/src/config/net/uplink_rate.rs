//! The rules for the rate of a switch's uplink, and for the rates that it guarantees to functions.

use std::fmt::Display;

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::net::NetConfig;

use crate::config::subject::Subject;

/// Rate in `config` that limits or guarantees something: 0 does not.
fn given(rate: Option<u32>) -> Option<u32> {
    rate.filter(|rate| *rate != 0)
}

fn conflict(subject: &Subject, key: &str, value: impl Display, what: String) -> Result<(), ConfigError> {
    Err(ConfigError::new(subject.key(key, value), Problem::Conflict(what)))
}

/// Checks that the uplink exists whose rate `pf` sets, if it sets one.
///
/// # Errors
///
/// Fails if there is no uplink.
pub(crate) fn check_uplink(pf: &NetConfig, subject: &Subject) -> Result<(), ConfigError> {
    let Some(rate) = given(pf.uplink_rate) else { return Ok(()) };
    let what = match pf.switch {
        None => "only the uplink of a switch has a rate; add switch=veb,tap=, or leave uplink_rate out",
        Some(_) if !pf.backend.is_given() => "the switch has no uplink; add tap=, or leave uplink_rate out",
        Some(_) => return Ok(()),
    };
    conflict(subject, "uplink_rate", rate, what.to_string())
}

/// Checks the rate that the port of `config` is guaranteed on the uplink of `pf`.
///
/// # Errors
///
/// Fails if the uplink has no rate, or the port may never send as much.
pub(crate) fn check_port(config: &NetConfig, pf: Option<&NetConfig>, subject: &Subject) -> Result<(), ConfigError> {
    let Some(rate) = given(config.policy.min_tx_rate) else { return Ok(()) };
    if pf.and_then(|pf| given(pf.uplink_rate)).is_none() {
        let what = "a part of the uplink's rate, which is not given; add uplink_rate= to the PF, or leave min_tx_rate \
                    out (docs/switch.md)";
        return conflict(subject, "min_tx_rate", rate, what.to_string());
    }
    match given(config.policy.max_tx_rate) {
        Some(most) if most < rate => {
            let what = format!("more than max_tx_rate={most}; give no more than that, or raise max_tx_rate");
            conflict(subject, "min_tx_rate", rate, what)
        }
        _ => Ok(()),
    }
}

/// Checks that the uplink of the PF, the first of `functions`, has the sum of the guaranteed rates.
///
/// # Errors
///
/// Fails if the sum exceeds the uplink's rate.
pub(crate) fn check_sum(functions: &[&NetConfig], subject: &Subject) -> Result<(), ConfigError> {
    let Some(rate) = functions.first().and_then(|pf| given(pf.uplink_rate)) else { return Ok(()) };
    let sum: u64 = functions.iter().filter_map(|config| config.policy.min_tx_rate).map(u64::from).sum();
    if sum <= u64::from(rate) {
        return Ok(());
    }
    let what = format!("the functions are guaranteed {sum} Mbit/s together (min_tx_rate); lower some, or raise this");
    conflict(subject, "uplink_rate", rate, what)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use crate::config::net::policy::info_of;
    use crate::config::{BackendPlan, NetPlan, NetVf, VmConfig, VmPlan};

    fn plan(net: &str, vfs: &[&str]) -> Result<NetPlan, String> {
        let made = || {
            let mut config = VmConfig { net: vec![format!("id=pf0,{net}").parse()?], ..VmConfig::default() };
            config.memory.shared = true;
            for vf in vfs {
                format!("pf=pf0,{vf}").parse::<NetVf>()?.add_to(&mut config.net, &["pf0".to_string()])?;
            }
            VmPlan::of(&config)
        };
        Ok(made().map_err(|error| error.to_string())?.nets().next().unwrap().clone())
    }

    #[test]
    fn each_port_is_guaranteed_what_it_was_given() {
        let net = "switch=veb,tap=up0,sriov_vfs=3,uplink_rate=1000,min_tx_rate=100";
        let planned = plan(net, &["index=0,min_tx_rate=900,max_tx_rate=900", "index=2,min_tx_rate=0"]).unwrap();
        let of = |backend: &BackendPlan| match backend {
            BackendPlan::Port(settings) => settings.min_tx_rate,
            other => panic!("{other:?}"),
        };
        assert_eq!(planned.functions().map(|function| of(&function.backend)).collect::<Vec<_>>(), [100, 900, 0, 0]);
        assert_eq!(planned.switch.unwrap().uplink_rate, NonZeroU32::new(1000));
        let pf = format!("id=pf0,{net}").parse().unwrap();
        assert_eq!(info_of(&pf).min_tx_rate, 100);
        let unlimited = plan("switch=veb,sriov_vfs=1,uplink_rate=0,min_tx_rate=0", &["index=0,min_tx_rate=0"]).unwrap();
        assert_eq!(unlimited.switch.unwrap().uplink_rate, None);
        assert!(plan("sriov_vfs=1,uplink_rate=0", &["index=0,min_tx_rate=0"]).is_ok());
    }

    #[test]
    fn an_impossible_guarantee_is_refused_with_what_to_do() {
        let no_port = "only a port of a switch has this; add switch=veb to the PF and name no tap or other backend for \
                       the VF, or leave min_tx_rate out (docs/switch.md)";
        let no_rate = "a part of the uplink's rate, which is not given; add uplink_rate= to the PF, or leave \
                       min_tx_rate out (docs/switch.md)";
        let vf = |what: &str| format!("--net-vf pf=pf0,index=0,min_tx_rate=5: {what}");
        let pf = |what: &str| format!("--net id=pf0,{what}");
        for (net, key, expected) in [
            ("sriov_vfs=1", "min_tx_rate=5", vf(no_port)),
            ("switch=veb,tap=t,uplink_rate=9,sriov_vfs=1", "tap=own,min_tx_rate=5", vf(no_port)),
            ("switch=veb,tap=t,uplink_rate=9,sriov_vfs=1", "vhost_user=on,socket=/s,min_tx_rate=5", vf(no_port)),
            ("switch=veb,tap=t,sriov_vfs=1", "min_tx_rate=5", vf(no_rate)),
            ("switch=veb,sriov_vfs=1", "min_tx_rate=5", vf(no_rate)),
            (
                "switch=veb,tap=t,uplink_rate=9,sriov_vfs=1",
                "min_tx_rate=5,max_tx_rate=4",
                vf("more than max_tx_rate=4; give no more than that, or raise max_tx_rate"),
            ),
            (
                "switch=veb,tap=t,uplink_rate=9,sriov_vfs=2,min_tx_rate=5",
                "min_tx_rate=5",
                pf("uplink_rate=9: the functions are guaranteed 10 Mbit/s together (min_tx_rate); lower some, or \
                     raise this"),
            ),
            (
                "switch=veb,tap=t,uplink_rate=9,sriov_vfs=2,min_tx_rate=4294967295",
                "min_tx_rate=4294967295",
                pf(
                    "uplink_rate=9: the functions are guaranteed 8589934590 Mbit/s together (min_tx_rate); lower some, \
                    or raise this",
                ),
            ),
            (
                "switch=veb,sriov_vfs=1,uplink_rate=9",
                "vlan=0",
                pf("uplink_rate=9: the switch has no uplink; add tap=, or leave uplink_rate out"),
            ),
            (
                "tap=t,sriov_vfs=1,uplink_rate=9",
                "vlan=0",
                pf("uplink_rate=9: only the uplink of a switch has a rate; add switch=veb,tap=, or leave uplink_rate \
                    out"),
            ),
        ] {
            assert_eq!(plan(net, &[&format!("index=0,{key}")]), Err(expected), "{net} {key}");
        }
    }
}
