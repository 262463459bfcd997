//! Hosts and origins that requests may name.

use std::net::IpAddr;

/// Returns whether a `Host` header, with or without port, names this machine.
pub(super) fn local_name(host: &str) -> bool {
    let name = host_name(host);
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    // nobody can register names that end so
    let reserved = [".localhost", ".internal", ".local"].iter().any(|end| name.ends_with(end));
    name == "localhost" || reserved || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Returns the name in a `Host` header, without its port.
pub(super) fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    }
}

/// Returns whether pages of `origin` may use the server at `host`: its own page, and `allowed` ones.
pub(super) fn allowed_origin(origin: &str, host: &str, allowed: &[String]) -> bool {
    let same = |other: &str| origin.eq_ignore_ascii_case(other);
    same(&format!("http://{host}"))
        || same(&format!("https://{host}"))
        || allowed.iter().any(|allowed| allowed == "*" || same(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_names_are_recognised() {
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "localhost.:1",
            "127.0.0.1:80",
            "127.1.2.3",
            "[::1]:8000",
            "a.localhost",
            "host.docker.internal:1",
        ] {
            assert!(local_name(host), "{host}");
        }
        for host in ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "10.0.0.1", "[::2]:1", "", "notlocalhost"]
        {
            assert!(!local_name(host), "{host}");
        }
    }

    #[test]
    fn origins_are_the_servers_own_or_allowed() {
        let allowed = ["https://example.org".to_owned()];
        assert!(allowed_origin("http://localhost:8000", "localhost:8000", &[]));
        assert!(allowed_origin("https://example.org", "localhost:8000", &allowed));
        assert!(allowed_origin("null", "localhost:8000", &["*".to_owned()]));
        for origin in ["null", "http://localhost:8001", "http://evil.com", "https://example.org.evil.com"] {
            assert!(!allowed_origin(origin, "localhost:8000", &allowed), "{origin}");
        }
    }
}
