//! The settings of `vfctl set`: `vlan=120`.

use serde::de::DeserializeOwned;
use serde_json::Value;
use vm_api::channel::Set;
use vm_api::config::net::policy::{MAX_QOS, MAX_VLAN};

/// Names of the settings, for errors.
const NAMES: &str = "vlan, vlan_qos, vlan_proto, mac, max_tx_rate, link and spoofchk";

/// The change of the VF at the address `vf`.
///
/// # Errors
///
/// Fails with a line that has the setting, what is wrong, and what to do.
pub(crate) fn parse(vf: &str, settings: &[String]) -> Result<Set, String> {
    let mut set = Set { vf: vf.to_owned(), ..Set::default() };
    for setting in settings {
        add(&mut set, setting)?;
    }
    Ok(set)
}

fn add(set: &mut Set, setting: &str) -> Result<(), String> {
    let (key, value) = setting.split_once('=').ok_or_else(|| format!("{setting}: no value; give {setting}=VALUE"))?;
    let wrong = |what: &str| format!("{setting}: {what}");
    let once = |is_given| if is_given { Err(wrong(&format!("{key} is given twice; give it once"))) } else { Ok(()) };
    match key {
        "vlan" => {
            once(set.vlan.replace(number(value, MAX_VLAN).ok_or(wrong("not a number from 0 to 4094"))?).is_some())
        }
        "vlan_qos" => once(
            set.vlan_qos.replace(number(value, MAX_QOS.into()).ok_or(wrong("not a number from 0 to 7"))?).is_some(),
        ),
        "vlan_proto" => once(set.vlan_proto.replace(word(value).ok_or(wrong("not 802.1q or 802.1ad"))?).is_some()),
        "mac" => once(set.mac.replace(word(value).ok_or(wrong("not an address such as 52:54:00:00:01:aa"))?).is_some()),
        "max_tx_rate" => {
            let rate = value.parse().map_err(|_| wrong("not a number of Mbit/s from 0 to 4294967295"))?;
            once(set.max_tx_rate.replace(rate).is_some())
        }
        "link" => once(set.link.replace(word(value).ok_or(wrong("not auto, up or down"))?).is_some()),
        "spoofchk" => {
            let is_on = match value {
                "on" => true,
                "off" => false,
                _ => return Err(wrong("not on or off")),
            };
            once(set.spoofchk.replace(is_on).is_some())
        }
        _ => Err(wrong(&format!("there is no setting {key}; there are {NAMES}"))),
    }
}

/// A number from 0 to `most`.
fn number<T: TryFrom<u16>>(text: &str, most: u16) -> Option<T> {
    let number = text.parse().ok().filter(|number| *number <= most)?;
    T::try_from(number).ok()
}

/// A value that JSON has as text.
fn word<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_value(Value::String(text.to_owned())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(settings: &[&str]) -> Result<String, String> {
        let settings: Vec<_> = settings.iter().map(|text| (*text).to_string()).collect();
        parse("0000:00:03.1", &settings).map(|set| serde_json::to_string(&set).unwrap())
    }

    #[test]
    fn each_setting_has_its_key_in_the_request() {
        let all = [
            "vlan=120",
            "vlan_qos=3",
            "vlan_proto=802.1ad",
            "mac=52:54:00:00:01:aa",
            "max_tx_rate=200",
            "link=down",
            "spoofchk=off",
        ];
        assert_eq!(
            parsed(&all).unwrap(),
            r#"{"vf":"0000:00:03.1","vlan":120,"vlan_qos":3,"vlan_proto":"802.1ad","mac":"52:54:00:00:01:aa",
            "max_tx_rate":200,"link":"down","spoofchk":false}"#
                .replace("\n            ", "")
        );
        assert_eq!(parsed(&["vlan=0"]).unwrap(), r#"{"vf":"0000:00:03.1","vlan":0}"#);
    }

    #[test]
    fn each_wrong_setting_is_an_error_of_one_line() {
        for (settings, line) in [
            (&["vlan"][..], "vlan: no value; give vlan=VALUE"),
            (&["vlan=4095"], "vlan=4095: not a number from 0 to 4094"),
            (&["vlan=-1"], "vlan=-1: not a number from 0 to 4094"),
            (&["vlan_qos=8"], "vlan_qos=8: not a number from 0 to 7"),
            (&["vlan_proto=q"], "vlan_proto=q: not 802.1q or 802.1ad"),
            (&["mac=aa"], "mac=aa: not an address such as 52:54:00:00:01:aa"),
            (&["max_tx_rate=1G"], "max_tx_rate=1G: not a number of Mbit/s from 0 to 4294967295"),
            (&["link=on"], "link=on: not auto, up or down"),
            (&["spoofchk=yes"], "spoofchk=yes: not on or off"),
            (&["vlan=1", "vlan=2"], "vlan=2: vlan is given twice; give it once"),
            (&["trust=on"], &format!("trust=on: there is no setting trust; there are {NAMES}")),
        ] {
            assert_eq!(parsed(settings).unwrap_err(), line);
        }
    }
}
