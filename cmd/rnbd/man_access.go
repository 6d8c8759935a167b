package main

import (
	"fmt"
	"slices"
	"strings"
)

// accessPage is rnbd-access(5). Other packages have pages that are called access.
func accessPage() manPage {
	p := manPage{name: "rnbd-access", section: 5, short: "rules by which clients may open devices of a rnbd server"}
	p.add("DESCRIPTION", prose("The key access of the server's configuration, rnbd-server.yaml(5), has a list of rules. "+
		"The first rule that fits a client and a device decides. Once there is a rule, a client that none fits is refused; "+
		"without rules every client may open every device. The rules of several files are one list, in the order of the files. "+
		"A refused client gets EACCES, whether the device exists or not, and the log and the audit log of the server name the rule.\n\n"+
		"The rules are asked when a device is opened and when a path joins a session, never for a request."))
	p.add("KEYS OF A RULE", prose("A key that a rule does not have fits everything, and limits nothing; allow is needed. A key that does not exist is an error, with file, line and column.")+
		accessKeyList("identity", "address", "fabric", "session", "device", "allow"))
	p.add("LIMITS", prose("What all clients together have by one rule. Requests beyond a rate wait at the server, each device's in their order, and devices of other rules do not wait for them.")+
		accessKeyList(limitKeys()...))
	p.add("IDENTITIES", prose("An identity is what TLS has proved: the SPIFFE ID of the client's certificate, else dns: and its first DNS name, else cn: and its common name; "+
		"psk: and a name for a shared key. Without TLS no client proves anything: address and session are what it says. In a pattern, *, ? and [a-z] stand for characters between slashes, and the word ** for any number of words, none included."))
	p.add("DEVICES", prose("Names are those below --search-path, without a slash in front, without . and empty words; patterns are those of identities. A symbolic link below the search path counts by the name of the link. "+
		"%IDENTITY% in the search path gives each identity a folder of its own; names are compared below it."))
	p.add("CHANGES", prose("rnbd config reload server takes over changed rules; an error in them keeps the old ones and says where it is. "+
		"A device that no rule allows any more is closed by force after --access-grace, and its client is told. "+
		"rnbd server access limit changes limits until the rules in the configuration change."))
	p.add("EXAMPLES", verbatim(`  access:
    - identity: ["spiffe://example/web"]
      device: ["web/**"]
      allow: rw
      iops: 2000
      bytes-per-second: 200000000
    - address: [10.0.0.0/16]
      device: ["images/*.iso"]
      allow: ro`)+
		prose("\nWhich rule decides about a client, without the client:\n")+
		verbatim("  rnbd server access check spiffe://example/web web/a.img rw --address 10.0.0.7"))
	p.add("SEE ALSO", ".BR rnbd-server.yaml (5),\n.BR rnbd-access-check (1),\n.BR rnbd-access-limit (1),\n.BR rnbd-access-list (1),\n.BR rnbd (7)")
	return p
}

// accessKeyList describes keys of a rule, in the order given.
func accessKeyList(keys ...string) string {
	var list strings.Builder
	for _, key := range keys {
		fmt.Fprintf(&list, ".TP\n.B %s:\n%s", escape(key), prose(accessKeys[key]))
	}
	return list.String()
}

// limitKeys are the keys of limits, sorted.
func limitKeys() (keys []string) {
	for key := range accessKeys {
		if !slices.Contains([]string{"identity", "address", "fabric", "session", "device", "allow"}, key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}
