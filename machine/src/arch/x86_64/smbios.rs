//! The SMBIOS tables (`DSP0134`, version 3.2), which describe the machine to the guest.
//!
//! A kernel without EFI searches for their entry point between 0xF0000 and 0xFFFFF (`§5.2`); firmware copies them from
//! there.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{Options as _, PlatformConfig};

use super::layout::{SMBIOS, SMBIOS_END};

/// The length of the entry point (`§5.2.2`).
const ENTRY_LEN: u8 = 24;
/// The address of the first structure.
const STRUCTURES: u64 = SMBIOS + ENTRY_LEN as u64;
/// The most strings of a structure: they are numbered from 1 by a byte (`§6.1.3`).
const MOST_STRINGS: usize = 255;

/// Structure types (`§7`).
mod kind {
    pub(super) const BIOS_INFORMATION: u8 = 0;
    pub(super) const SYSTEM_INFORMATION: u8 = 1;
    pub(super) const SYSTEM_ENCLOSURE: u8 = 3;
    pub(super) const OEM_STRINGS: u8 = 11;
    pub(super) const END_OF_TABLE: u8 = 127;
}

/// BIOS Characteristics: PCI is supported (`§7.1.1`).
const PCI_SUPPORTED: u64 = 1 << 7;
/// BIOS Characteristics Extension Byte 2: the structures describe a virtual machine (`§7.1.2.2`).
const VIRTUAL_MACHINE: u8 = 1 << 4;
/// An unknown wake-up type, chassis type or state (`§7.2.2`, `§7.4.1`, `§7.4.2`).
const UNKNOWN: u8 = 2;
/// The security status of a chassis: none (`§7.4.3`).
const NO_SECURITY: u8 = 3;

/// The entry point and the structures, which must be at [`SMBIOS`].
///
/// # Errors
///
/// Fails with a string that the tables cannot hold.
pub fn tables(platform: &PlatformConfig, warnings: &mut Vec<String>) -> Result<Vec<u8>, ConfigError> {
    let mut table = Table::default();
    table.add(kind::BIOS_INFORMATION, |bios| {
        bios.string("cloud-hypervisor");
        bios.string("0");
        // Starting address segment, release date and ROM size: there is no ROM.
        bios.bytes(&[0; 4]);
        bios.bytes(&PCI_SUPPORTED.to_le_bytes());
        bios.bytes(&[0, VIRTUAL_MACHINE]);
        // Releases of the BIOS and of an embedded controller, which are not supported, and the extended ROM size.
        bios.bytes(&[0xff, 0xff, 0xff, 0xff, 0, 0]);
    });
    let uuid = platform.system_uuid.as_deref().filter(|text| !text.is_empty()).map_or([0; 16], |text| {
        uuid(text).unwrap_or_else(|| {
            warnings.push(format!(
                "{} system_uuid={text}: not a UUID, such as 0f6c53a4-2b1e-4a5c-9d7e-8a1b2c3d4e5f; the guest sees none",
                PlatformConfig::OPTION
            ));
            [0; 16]
        })
    });
    table.try_add(kind::SYSTEM_INFORMATION, |system| {
        let manufacturer = platform.system_manufacturer.as_deref().unwrap_or("Cloud Hypervisor");
        system.given("system_manufacturer", Some(manufacturer))?;
        let product_name = platform.system_product_name.as_deref().unwrap_or("cloud-hypervisor");
        system.given("system_product_name", Some(product_name))?;
        system.given("system_version", platform.system_version.as_deref())?;
        system.given("system_serial_number", platform.system_serial_number.as_deref())?;
        system.bytes(&uuid);
        system.bytes(&[UNKNOWN]);
        system.given("system_sku_number", platform.system_sku_number.as_deref())?;
        system.given("system_family", platform.system_family.as_deref())
    })?;
    if let Some(tag) = platform.chassis_asset_tag.as_deref() {
        table.try_add(kind::SYSTEM_ENCLOSURE, |chassis| {
            // Manufacturer, type, version, serial number.
            chassis.bytes(&[0, UNKNOWN, 0, 0]);
            chassis.given("chassis_asset_tag", Some(tag))?;
            chassis.bytes(&[UNKNOWN, UNKNOWN, UNKNOWN, NO_SECURITY]);
            // OEM-defined, height, power cords, contained elements and their length, SKU number.
            chassis.bytes(&[0; 9]);
            Ok(())
        })?;
    }
    if !platform.oem_strings.is_empty() {
        table.try_add(kind::OEM_STRINGS, |oem| oem.list("oem_strings", &platform.oem_strings))?;
    }
    table.add(kind::END_OF_TABLE, |_| {});
    let room = SMBIOS_END - STRUCTURES;
    if table.bytes.len() as u64 > room {
        let what =
            format!("the SMBIOS tables have {} bytes, and there is room for {room}; shorten them", table.bytes.len());
        return Err(ConfigError::new(format!("{} ...", PlatformConfig::OPTION), Problem::Limit(what)));
    }
    Ok([entry_point(table.bytes.len() as u32), table.bytes].concat())
}

/// The 64-bit entry point of structures of `len` bytes (`§5.2.2`).
fn entry_point(len: u32) -> Vec<u8> {
    let mut bytes = b"_SM3_".to_vec();
    // Checksum; length; version 3.2, document revision 0; entry point revision 1; reserved.
    bytes.extend([0, ENTRY_LEN, 3, 2, 0, 1, 0]);
    bytes.extend(len.to_le_bytes());
    bytes.extend(STRUCTURES.to_le_bytes());
    let sum = bytes.iter().copied().fold(0, u8::wrapping_add);
    if let Some(checksum) = bytes.get_mut(5) {
        *checksum = sum.wrapping_neg();
    }
    bytes
}

/// The UUID in `text`, in the format of the tables; all zero means none (`§7.2.1`).
fn uuid(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<_> = text.split('-').collect();
    let is_hexadecimal = groups.iter().all(|group| group.bytes().all(|digit| digit.is_ascii_hexdigit()));
    let lengths: Vec<_> = groups.iter().map(|group| group.len()).collect();
    let number = match lengths[..] {
        [32] | [8, 4, 4, 4, 12] if is_hexadecimal => u128::from_str_radix(&groups.concat(), 16).ok(),
        _ => None,
    };
    let little_endian = |number: u128| {
        let mut bytes = number.to_be_bytes();
        // The first three fields: one of four bytes and two of two.
        for field in [0..4, 4..6, 6..8] {
            bytes[field].reverse();
        }
        bytes
    };
    number.map(little_endian)
}

fn wrong(key: &str, value: &str, problem: Problem) -> ConfigError {
    ConfigError::new(format!("{} {key}={value}", PlatformConfig::OPTION), problem)
}

/// The structures so far.
#[derive(Default)]
struct Table {
    bytes: Vec<u8>,
    structures: u16,
}

/// Structure: its formatted area after the header, and its strings.
#[derive(Default)]
struct Structure {
    formatted: Vec<u8>,
    strings: Vec<u8>,
    count: u8,
}

impl Table {
    fn add(&mut self, kind: u8, fill: impl FnOnce(&mut Structure)) {
        let mut structure = Structure::default();
        fill(&mut structure);
        self.push(kind, structure);
    }

    fn try_add(
        &mut self,
        kind: u8,
        fill: impl FnOnce(&mut Structure) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        let mut structure = Structure::default();
        fill(&mut structure)?;
        self.push(kind, structure);
        Ok(())
    }

    /// Appends a structure with its header and the end of its strings (`§6.1.2`, `§6.1.3`).
    fn push(&mut self, kind: u8, Structure { formatted, strings, count }: Structure) {
        self.bytes.extend([kind, 4 + formatted.len() as u8]);
        self.bytes.extend(self.structures.to_le_bytes());
        self.structures += 1;
        self.bytes.extend(formatted);
        self.bytes.extend(strings);
        self.bytes.extend(if count == 0 { &[0, 0][..] } else { &[0] });
    }
}

impl Structure {
    fn bytes(&mut self, bytes: &[u8]) {
        self.formatted.extend(bytes);
    }

    /// A field with the number of `text`, which follows the formatted area. 0 stands for no string.
    fn string(&mut self, text: &str) {
        let number = self.number(text);
        self.formatted.push(number);
    }

    fn number(&mut self, text: &str) -> u8 {
        if text.is_empty() {
            return 0;
        }
        self.strings.extend(text.as_bytes());
        self.strings.push(0);
        self.count += 1;
        self.count
    }

    /// Adds a field for a string that the user has given, or for none.
    fn given(&mut self, key: &str, text: Option<&str>) -> Result<(), ConfigError> {
        let text = text.unwrap_or_default();
        check(key, text)?;
        self.string(text);
        Ok(())
    }

    /// Adds the number of `texts`, which only follow the formatted area (`§7.12`).
    fn list(&mut self, key: &str, texts: &[String]) -> Result<(), ConfigError> {
        let number = u8::try_from(texts.len()).map_err(|_| {
            let what = format!("{} strings, and SMBIOS numbers at most {MOST_STRINGS}; give fewer", texts.len());
            wrong(key, "[...]", Problem::Limit(what))
        })?;
        for text in texts {
            check(key, text)?;
            if text.is_empty() {
                let what = "an empty string ends the list in SMBIOS; leave it out".to_string();
                return Err(wrong(key, "[\"\"]", Problem::Value(what)));
            }
            self.number(text);
        }
        self.formatted.push(number);
        Ok(())
    }
}

/// Checks a string that the user has given.
fn check(key: &str, text: &str) -> Result<(), ConfigError> {
    if text.contains('\0') {
        let what = "an SMBIOS string ends at a NUL character; remove it".to_string();
        return Err(wrong(key, text, Problem::Value(what)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A structure as a guest parses it.
    #[derive(Debug)]
    struct Parsed {
        kind: u8,
        formatted: Vec<u8>,
        strings: Vec<String>,
    }

    impl Parsed {
        /// The string with the number at `offset` of the structure.
        fn string(&self, offset: usize) -> Option<&str> {
            let number = usize::from(self.formatted[offset]);
            number.checked_sub(1).map(|index| self.strings[index].as_str())
        }
    }

    /// Finds the entry point and follows it, by the rules of the standard alone.
    fn parse(tables: &[u8]) -> Vec<Parsed> {
        assert_eq!(&tables[..5], b"_SM3_");
        assert_eq!(tables[..24].iter().copied().fold(0, u8::wrapping_add), 0, "checksum");
        assert_eq!((tables[6], tables[7], tables[8], tables[10]), (24, 3, 2, 1));
        let len = u32::from_le_bytes(tables[12..16].try_into().unwrap()) as usize;
        let address = u64::from_le_bytes(tables[16..24].try_into().unwrap());
        let mut rest = &tables[(address - SMBIOS) as usize..][..len];
        let mut structures = Vec::new();
        while !rest.is_empty() {
            let (formatted, after) = rest.split_at(rest[1].into());
            assert_eq!(u16::from_le_bytes([formatted[2], formatted[3]]), structures.len() as u16, "handle");
            let end = after.windows(2).position(|pair| pair == [0, 0]).unwrap();
            let strings = after[..end].split(|byte| *byte == 0).filter(|text| !text.is_empty());
            let strings = strings.map(|text| String::from_utf8(text.to_vec()).unwrap()).collect();
            structures.push(Parsed { kind: formatted[0], formatted: formatted.to_vec(), strings });
            rest = &after[end + 2..];
        }
        structures
    }

    fn of(text: &str) -> Vec<Parsed> {
        parse(&tables(&text.parse().unwrap(), &mut Vec::new()).unwrap())
    }

    fn kinds(structures: &[Parsed]) -> Vec<u8> {
        structures.iter().map(|structure| structure.kind).collect()
    }

    #[test]
    fn a_vm_without_strings_has_cloud_hypervisors_names() {
        let structures = of("");
        assert_eq!(kinds(&structures), [0, 1, 127]);
        let (bios, system) = (&structures[0], &structures[1]);
        assert_eq!((bios.string(4), bios.string(5)), (Some("cloud-hypervisor"), Some("0")));
        assert_eq!((bios.formatted.len(), bios.formatted[0x13]), (0x1a, 1 << 4));
        assert_eq!((system.string(4), system.string(5)), (Some("Cloud Hypervisor"), Some("cloud-hypervisor")));
        assert_eq!([6, 7, 0x19, 0x1a].map(|offset| system.string(offset)), [None; 4]);
        assert_eq!((system.formatted.len(), &system.formatted[8..24]), (0x1b, &[0; 16][..]));
    }

    #[test]
    fn each_string_is_where_the_guest_looks_for_it() {
        let structures = of("system_manufacturer=M,system_product_name=P,system_version=V,system_serial_number=S,\
             system_uuid=00112233-4455-6677-8899-aabbccddeeff,system_sku_number=K,system_family=F,\
             chassis_asset_tag=T,oem_strings=[one,\"two, three\"]");
        assert_eq!(kinds(&structures), [0, 1, 3, 11, 127]);
        let system = &structures[1];
        let strings = [4, 5, 6, 7, 0x19, 0x1a].map(|offset| system.string(offset).unwrap());
        assert_eq!(strings, ["M", "P", "V", "S", "K", "F"]);
        // The first three fields of a UUID are little-endian (§7.2.1).
        let uuid = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].map(|byte: u8| byte << 4 | byte);
        assert_eq!(system.formatted[8..24], uuid);
        let chassis = &structures[2];
        assert_eq!((chassis.string(8), chassis.string(4), chassis.formatted.len()), (Some("T"), None, 0x16));
        let oem = &structures[3];
        assert_eq!(
            (&oem.formatted[4..], &oem.strings[..]),
            (&[2][..], &["one".to_string(), "two, three".to_string()][..])
        );
    }

    #[test]
    fn the_older_names_of_two_keys_mean_the_same() {
        let uuid = "00112233445566778899aabbccddeeff";
        let old: PlatformConfig = format!("serial_number=S,uuid={uuid}").parse().unwrap();
        assert_eq!(old, format!("system_serial_number=S,system_uuid={uuid}").parse().unwrap());
    }

    #[test]
    fn an_empty_string_is_none() {
        let empty = Some(String::new());
        let platform = PlatformConfig {
            system_manufacturer: empty.clone(),
            system_family: empty.clone(),
            system_uuid: empty,
            ..PlatformConfig::default()
        };
        let system = &parse(&tables(&platform, &mut Vec::new()).unwrap())[1];
        assert_eq!((system.string(4), system.string(5), system.string(0x1a)), (None, Some("cloud-hypervisor"), None));
    }

    #[test]
    fn a_uuid_that_is_none_is_not_seen_and_warned_of() {
        for text in ["xyz", "0011", "00112233445566778899aabbccddee-ff", "+0112233-4455-6677-8899-aabbccddeeff", "é"] {
            let platform = PlatformConfig { system_uuid: Some(text.to_string()), ..PlatformConfig::default() };
            let mut warnings = Vec::new();
            let given = tables(&platform, &mut warnings).unwrap();
            assert_eq!(given, tables(&PlatformConfig::default(), &mut Vec::new()).unwrap());
            let said = format!("--platform system_uuid={text}: not a UUID, ");
            assert!(warnings.len() == 1 && warnings[0].starts_with(&said), "{warnings:?}");
        }
    }

    #[test]
    fn a_string_that_the_tables_cannot_hold_is_refused() {
        let refused = |change: fn(&mut PlatformConfig)| {
            let mut platform = PlatformConfig::default();
            change(&mut platform);
            tables(&platform, &mut Vec::new()).unwrap_err().to_string()
        };
        assert_eq!(
            refused(|platform| platform.system_version = Some("a\0b".to_string())),
            "--platform system_version=a\\u{0}b: an SMBIOS string ends at a NUL character; remove it"
        );
        assert_eq!(
            refused(|platform| platform.oem_strings = vec!["a".to_string(), String::new()]),
            "--platform oem_strings=[\"\"]: an empty string ends the list in SMBIOS; leave it out"
        );
        assert_eq!(
            refused(|platform| platform.oem_strings = vec!["x".to_string(); 256]),
            "--platform oem_strings=[...]: 256 strings, and SMBIOS numbers at most 255; give fewer"
        );
        let message = refused(|platform| platform.oem_strings = vec!["x".repeat(0x1_0000)]);
        assert!(message.ends_with("and there is room for 65496; shorten them"), "{message}");
        let mut most = PlatformConfig { oem_strings: vec!["x".to_string(); 255], ..PlatformConfig::default() };
        assert_eq!(parse(&tables(&most, &mut Vec::new()).unwrap())[2].strings.len(), 255);
        let used = tables(&most, &mut Vec::new()).unwrap().len();
        most.oem_strings[0] = "x".repeat((SMBIOS_END - SMBIOS) as usize - used + 1);
        assert_eq!(tables(&most, &mut Vec::new()).unwrap().len() as u64, SMBIOS_END - SMBIOS);
    }
}
