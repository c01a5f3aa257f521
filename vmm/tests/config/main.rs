//! Configurations: their text and JSON, the rules that they can break, and the plans that they resolve to.

#![expect(clippy::unwrap_used, reason = "what fails here is a failed test")]

mod machine;
mod macs;
mod nics;
mod plan;
mod text;
mod x550;

use vmm::config::{ConfigError, NetConfig, NetPlan, NetVf, VmConfig, VmPlan};

/// A VM of 4 vCPUs with these `--net` and `--net-vf` options.
pub fn vm(nets: &[&str], vfs: &[&str]) -> Result<VmConfig, ConfigError> {
    let mut config = VmConfig::default();
    config.payload.kernel = Some("vmlinux".into());
    config.cpus = "boot=4".parse()?;
    for net in nets {
        config.net.push(net.parse()?);
    }
    let ids = config.ids().of::<NetConfig>();
    for vf in vfs {
        vf.parse::<NetVf>()?.add_to(&mut config.net, &ids)?;
    }
    Ok(config)
}

/// The plan of such a VM.
pub fn plan(nets: &[&str], vfs: &[&str]) -> Result<Vec<NetPlan>, ConfigError> {
    Ok(VmPlan::of(&vm(nets, vfs)?)?.nets().cloned().collect())
}

/// Error for a configuration that must be refused.
pub fn refusal(nets: &[&str], vfs: &[&str]) -> String {
    let line = plan(nets, vfs).unwrap_err().to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

/// Error for a VM of 4 vCPUs after a change.
pub fn with(change: impl FnOnce(&mut VmConfig)) -> String {
    let mut config = vm(&[], &[]).unwrap();
    change(&mut config);
    VmPlan::of(&config).unwrap_err().to_string()
}
