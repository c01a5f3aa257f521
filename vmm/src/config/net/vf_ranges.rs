//! Settings for several VFs (`index=0-63`, `index=*`), which become those of each VF.

use std::collections::BTreeMap;

use crate::config::subject::Subject;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::net::{NetConfig, VfConfig};
use vm_api::config::{PolicyConfig, VmConfig};

/// The most ranges of a PF: each may be for all VFs, and a client can give many.
const MOST_RANGES: usize = 64;
/// The most elements of the lists of VLANs that one range gives to its VFs.
const MOST_VLANS: usize = 1 << 20;

/// True if there are settings for several VFs.
pub(crate) fn has_any(config: &VmConfig) -> bool {
    config.net.iter().any(has_range)
}

fn has_range(net: &NetConfig) -> bool {
    net.vfs.iter().any(|vf| vf.index.one().is_none())
}

/// The configuration with an entry for each VF, in their order, for PFs with ranges. There must be buses for all VFs.
///
/// # Errors
///
/// Fails if a range names a VF that is not reserved, or a key that only one VF can have.
pub(crate) fn expanded(config: &VmConfig) -> Result<VmConfig, ConfigError> {
    let mut all = config.clone();
    for (net, id) in all.net.iter_mut().zip(config.ids().of::<NetConfig>()).filter(|(net, _)| has_range(net)) {
        net.vfs = expand(net, &id)?;
    }
    Ok(all)
}

/// The settings of each VF of `pf`. Later entries override earlier ones, but none is given twice for one VF alone.
fn expand(pf: &NetConfig, id: &str) -> Result<Vec<VfConfig>, ConfigError> {
    let (mut vfs, mut ranges) = (BTreeMap::<u16, (VfConfig, bool)>::new(), 0);
    for given in &pf.vfs {
        let fail = |problem| ConfigError::new(Subject::vf(id, given.index).bare(), problem);
        let is_alone = given.index.one().is_some();
        ranges += usize::from(!is_alone);
        if ranges > MOST_RANGES {
            return Err(fail(Problem::Limit(format!("a PF takes at most {MOST_RANGES} ranges of VFs; give fewer"))));
        }
        if let Some(key) = given.key_of_one() {
            let what = format!("{key} belongs to one VF, and this index is several; give {key} with the index of one");
            return Err(fail(Problem::Conflict(what)));
        }
        let indices = given.index.among(id, pf.sriov_vfs).map_err(|what| fail(Problem::Value(what)))?;
        check_trunk(&given.policy, indices.len()).map_err(|what| fail(Problem::Limit(what)))?;
        for index in indices {
            let new = || (VfConfig { index: index.into(), ..VfConfig::default() }, false);
            let (vf, was_alone) = vfs.entry(index).or_insert_with(new);
            if is_alone && std::mem::replace(was_alone, true) {
                return Err(fail(Problem::Conflict(given_twice(id, index))));
            }
            vf.override_with(given);
        }
    }
    Ok(vfs.into_values().map(|(vf, _)| vf).collect())
}

/// Checks that `count` copies of the policy's list of VLANs are not too large.
///
/// # Errors
///
/// Fails with the fault, in one line.
pub(crate) fn check_trunk(policy: &PolicyConfig, count: usize) -> Result<(), String> {
    let elements = policy.trunk.as_ref().map_or(0, |trunk| trunk.0.len());
    let most = MOST_VLANS / count.max(1);
    if elements <= most {
        return Ok(());
    }
    Err(format!("trunk has {elements} elements, and for {count} VFs at most {most} can be kept; give ranges of VLANs"))
}

/// The error for a VF with two entries.
pub(crate) fn given_twice(id: &str, index: u16) -> String {
    format!("VF {index} of {id} is given twice; put all its keys into one")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NetVf, PlannedVm};

    fn config(pf: &str, vfs: &[&str]) -> VmConfig {
        let mut config = VmConfig { net: vec![format!("id=pf0,{pf}").parse().unwrap()], ..VmConfig::default() };
        config.net[0].vfs = vfs.iter().map(|vf| format!("pf=pf0,{vf}").parse::<NetVf>().unwrap().vf).collect();
        config
    }

    fn shown(pf: &str, vfs: &[&str]) -> Vec<String> {
        let planned = PlannedVm::new(config(pf, vfs)).unwrap();
        planned.config().net[0].vfs.iter().map(|vf| vf.to_string()).collect()
    }

    fn refused(pf: &str, vfs: &[&str]) -> String {
        PlannedVm::new(config(pf, vfs)).unwrap_err().to_string()
    }

    #[test]
    fn later_entries_override_earlier_ones_key_by_key() {
        let backend = "vhost_user=off,vhost_mode=client";
        assert_eq!(
            shown(
                "sriov_vfs=4",
                &[
                    "index=2,tap=own,vlan=7",
                    "index=*,spoofchk=on,vlan=5,vhost=auto",
                    "index=0-1,vlan=6",
                    "index=1,vhost=off"
                ]
            ),
            [
                format!("index=0,vhost=auto,{backend},vlan=6,spoofchk=on"),
                format!("index=1,vhost=off,{backend},vlan=6,spoofchk=on"),
                format!("index=2,tap=own,vhost=auto,{backend},vlan=5,spoofchk=on"),
                format!("index=3,vhost=auto,{backend},vlan=5,spoofchk=on"),
            ]
        );
        let planned =
            PlannedVm::new(config("sriov_vfs=32512", &["index=*,spoofchk=on", "index=32511,trust=on"])).unwrap();
        assert_eq!(
            (planned.config().net[0].vfs.len(), planned.config().net[0].vf(32_511).unwrap().policy.trust),
            (32_512, Some(true))
        );
    }

    #[test]
    fn a_range_is_refused_by_what_it_cannot_name() {
        let said = |what: &str| format!("--net-vf pf=pf0,index={what}");
        assert_eq!(
            refused("sriov_vfs=8", &["index=0-63,spoofchk=on"]),
            said("0-63: VFs 8-63 are out of range: pf0 reserves 8 VFs (sriov_vfs=8); index must be 0 to 7")
        );
        assert_eq!(refused("", &["index=*,spoofchk=on"]), said("*: pf0 reserves no VFs; add sriov_vfs= to its --net"));
        for (vf, key) in [
            ("tap=t", "tap"),
            ("mac=52:54:00:00:00:01", "mac"),
            ("vhost_user=on", "vhost_user"),
            ("fd=[7]", "fd"),
            ("vhost_mode=server", "vhost_mode"),
        ] {
            let what = format!("{key} belongs to one VF, and this index is several; give {key} with the index of one");
            assert_eq!(refused("sriov_vfs=8", &[&format!("index=0-7,{vf}")]), said(&format!("0-7: {what}")));
        }
        assert_eq!(
            refused("sriov_vfs=8", &["index=1,vlan=5", "index=*,vlan=6", "index=1,vlan=7"]),
            said("1: VF 1 of pf0 is given twice; put all its keys into one")
        );
        assert_eq!(
            refused("sriov_vfs=8", &["index=2-3,vlan=5000"]),
            said("2,vlan=5000: not a VLAN; give 1 to 4094, or 0 for none")
        );
        assert!(refused("sriov_vfs=65535", &["index=*"]).contains("buses for 32512 VFs"));
        let many = vec!["index=*"; MOST_RANGES + 1];
        assert_eq!(refused("sriov_vfs=2", &many), said("*: a PF takes at most 64 ranges of VFs; give fewer"));
    }

    #[test]
    fn many_copies_of_a_long_list_of_vlans_are_refused() {
        let vlans = (0..40).map(|id| (2 * id).to_string()).collect::<Vec<_>>().join(",");
        let error = refused("sriov_vfs=32512", &[&format!("index=*,trunk=[{vlans}]")]);
        let what = "trunk has 40 elements, and for 32512 VFs at most 32 can be kept; give ranges of VLANs";
        assert_eq!(error, format!("--net-vf pf=pf0,index=*: {what}"));
        PlannedVm::new(config("sriov_vfs=64", &[&format!("index=*,trunk=[{vlans}]")])).unwrap();
    }

    #[test]
    fn a_document_with_a_range_is_named_by_its_own_paths() {
        let text = br#"{"payload": {"kernel": "k"}, "net": [{"id": "pf0", "sriov_vfs": 4, "vfs": [
            {"index": 3, "trust": true}, {"index": "*", "vlan": 5}, {"index": "1-2", "vlan": 5000}]}]}"#;
        let config = VmConfig::from_json(text).unwrap();
        let error = PlannedVm::of_document(config).unwrap_err().to_string();
        assert!(error.starts_with("net[0].vfs[2].vlan=5000: "), "{error}");
        let beyond = br#"{"net": [{"id": "pf0", "sriov_vfs": 4, "vfs": [{"index": 1}, {"index": "2-4", "vlan": 5}]}]}"#;
        let error = PlannedVm::of_document(VmConfig::from_json(beyond).unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("net[0].vfs[1]: VF 4 is out of range: "), "{error}");
    }
}
