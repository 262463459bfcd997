"""What texts are made of: names, words and templates, in two disjoint parts, for training and for measuring."""

from pathlib import Path

# One entry of each list in so many is held out.
HELD_OUT_EVERY = 6

FIRST = """Aaron Abena Adam Adriana Agnes Ahmed Aisha Akira Alan Alejandro Alice Amara Amelia Amir Ana Anders André Andrew
Angela Anita Anna Anthony Antoine Arjun Astrid Ava Beatriz Ben Bilal Björn Brandon Brian Bruno Camila Carlos Carmen
Caroline Catherine Cécile Charles Charlotte Chen Chidi Chloe Christian Christopher Claire Clara Daniel David Deborah Deepak
Diana Diego Dmitri Dorothy Edward Elena Elias Elif Elizabeth Ella Emeka Emily Emma Eric Esra Esther Ethan Eva Farah
Fatima Felix Fernando Fiona François Frank Freya Gabriel George Giulia Grace Grzegorz Gustav Hana Hannah Harold Hassan Heidi
Helen Henry Hiroshi Hugo Ian Ibrahim Ines Ingrid Irina Isaac Isabella Ivan Jack Jacob Jakub James Jane Jasmine Javier
Jennifer Jiro Joan João Johan John Jonas José Joseph Joshua Juan Julia Julien Jürgen Kaito Karen Karim Katarzyna Keiko
Kenneth Kofi Kumar Kwame Lars Laura Layla Leila Leo Liam Lin Linda Lucas Lucía Luigi Lukas Maria Marie Mark Marta Martin
Mary Mateo Matthew Maya Mehmet Mei Melissa Mia Michael Miguel Mohammed Monika Nadia Naomi Natalia Nathan Nia Nicole Nikolai
Nina Noah Nora Olga Oliver Olivia Omar Oscar Owen Pablo Patricia Patrick Paul Pedro Peter Petra Philip Pierre Priya Rachel
Rafael Rahul Rania Rebecca Ricardo Richard Robert Rosa Ruth Ryan Samuel Sandra Sanjay Sara Sebastian Sergei Shanice Simon
Sofia Sonia Sophie Stefan Stella Stephen Sunita Susan Svetlana Takeshi Tariq Teresa Thabo Theo Thomas Tim Tomás Ursula
Valentina Victor Victoria Vikram Vincent Walter Wei William Yara Yasmin Yuki Yusuf Zara Zoë""".split()
LAST = """Abbott Abdi Acosta Adeyemi Ahmadi Ali Allen Alvarez Andersen Anderson Arslan Bailey Baker Banerjee Barnes Becker
Bell Bennett Bianchi Blake Bondarenko Boateng Brooks Brown Burke Butler Campbell Carter Castillo Chang Chen Choi Clark
Clarke Cohen Coleman Collins Cook Cooper Costa Cruz Dahl Davies Davis Delgado Diallo Diaz Dixon Dubois Duncan Edwards Ekström
Eriksson Evans Farouk Fernandes Fischer Fleming Flores Foster Fournier Fraser Fujita Garcia Gibson Girard Goldberg Gomez
Gonzalez Gordon Graham Grant Gray Green Gupta Haddad Hall Hamilton Hansen Harris Harrison Hayashi Hayes Henderson Herrera
Hoffmann Holm Horvath Howard Hughes Hussain Ito Ivanov Jackson Jansen Jensen Johansson Johnson Jones Joshi Kaplan Kapoor
Kaur Keller Kelly Kennedy Khan Kim Kimura King Klein Kovács Kowalski Kozlov Lambert Larsen Laurent Lee Lefebvre Lehmann
Levy Lewis Li Lindqvist Liu Lopez Lund MacDonald Marino Marshall Martin Martinez Mason Mbeki McCarthy McKenzie Mehta Meyer
Miller Mitchell Mohamed Molina Moore Morales Moreau Morgan Morris Müller Murphy Murray Nakamura Nair Navarro Nelson Nguyen
Nielsen Novak Nwosu O'Brien O'Connor Okafor Okonkwo Oliveira Olsen Ortiz Osei Owens Palmer Park Parker Patel Pereira Perez
Petersen Petrov Phillips Popescu Powell Price Quinn Rahman Ramirez Ramos Rao Reed Reyes Reynolds Ricci Richards Rivera
Roberts Robinson Rodriguez Rossi Russell Ryan Saito Salazar Sánchez Santos Sato Schmidt Schneider Scott Shah Sharma Shaw
Simmons Singh Smith Sokolov Stewart Suzuki Svensson Tanaka Taylor Thompson Torres Tran Turner Ueda Vargas Vasquez Volkov
Wagner Walker Wallace Wang Ward Watson Weber White Williams Wilson Wong Wright Wu Yamamoto Yang Yılmaz Young Zhang
Zimmermann""".split()
STREET = """Abbey Acacia Alder Ash Beech Birch Bridge Broad Canal Castle Cedar Chapel Cherry Chestnut Church Clifton College
Cross Elm Fairview Forest Garden George Grove Harbour Hawthorn Hazel High Highland Hill Holly Jubilee Juniper Kingsway Lake
Lakeside Laurel Lavender Lincoln Linden Main Manor Maple Market Meadow Mill Mulberry North Oak Orchard Park Pine Poplar
Prospect Queen Ridge River Riverside Rose Sandpiper School South Spring Spruce Station Stone Sunset Sycamore Thornhill
Union Valley Victoria Vine Walnut Washington Water Wellington West Willow Windsor Woodland York""".split()
CITY = """Aberdeen Albany Atlanta Austin Bath Berlin Birmingham Bordeaux Boston Bristol Brno Bruges Calgary Cambridge Cardiff
Charlotte Chicago Cologne Columbus Cork Dallas Denver Derby Dresden Dublin Dundee Durham Edinburgh Exeter Fresno Galway Geneva
Ghent Glasgow Graz Hamburg Hartford Houston Hull Ipswich Kingston Lagos Leeds Leicester Leipzig Lille Lincoln Lisbon London
Lyon Madison Madrid Malmö Manchester Memphis Milan Munich Nairobi Nantes Nashville Newport Norwich Nottingham Oakland Omaha
Oslo Ottawa Oxford Paris Perth Phoenix Plymouth Porto Portland Prague Preston Pune Quebec Reading Richmond Rome Rotterdam
Salem Seattle Seville Sheffield Springfield Stockholm Swansea Sydney Tampere Toledo Toronto Tucson Turin Utrecht Valencia
Vienna Warsaw Winchester York Zagreb Zürich""".split()
DOMAIN = """acorn amber atlas aurora beacon bluefin bramble brightside cascade cobalt compass copper corvid delta driftwood
ember evergreen fairwind falcon fernhill foxglove glacier granite greenleaf harvest heron horizon indigo ironwood jasper
juniper keystone lantern larkspur lighthouse lumen marigold meridian mosaic nimbus northwind oakbridge orbit osprey pebble
pinecone pioneer quartz redwood ripple saffron sequoia silverline skylark sparrow starling summit sunrise tamarack thistle
tidewater timber topaz tundra verdant vertex willowbrook wren zephyr""".split()
EVERYDAY = """able about account across address afternoon agenda agree air almost along already answer apple april area around
article attach autumn back balance bank basket battery because before behind best between big bill black blue board boat
book box bread break bridge bright bring brown budget build button call camera card careful change chapter chart check
city clean clear clock close cloud coffee cold colour common company complete contract copy corner cost count country
course cover create credit cup current customer daily date deep delay deliver desk detail different dinner door draft
drive early east easy edge email empty engine enough entry error evening every example expect extra fast feature field
figure file final find first floor follow food form free friend front full garden general glass good great green group
guide half hand happy hard heavy help high holiday home hotel hour house image important inside invoice issue item job join
journey keep key kitchen label lamp large last later launch leave letter level library light line list little local log long
look lunch machine mail main manager map market match matter meeting member message middle minute mobile model money month
morning music name narrow near network new next night north note notice number offer office old open option orange order
other outside package page paper parcel park part party password path payment people phone photo picture plan plant plate
point policy post price printer problem product project quick quiet rain range ready reason receipt record red refund
regular release remote repair report request result return review right river road room round route rule safe sale same
sample schedule school screen season second secret section send serious server service set share shelf ship shop short
side sign simple site size small smooth snow soft solid son song soon sort south space special spring staff stage station
step stock stone store storm story street strong student subject sugar summer support sure system table team test text thick
thin ticket time title today together tool top total town track train travel tree trip update usual value version view
visit wait walk wall warm water weather website week west wheel white wide window winter wood word work year yellow""".split()
# Also the words of this repository's book, most of them technical.
WORDS = EVERYDAY * 4 + (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()
FUNCTION_WORDS = """a about after all also an and any are as at be because been before but by can could do each few for from
had has have he her here his how i if in into is it its just like many may me more most must my no not now of on one only or
our out over please same she should since so some soon still than thank that the their them then there these they this those
to too until up us was we were what when where which while who will with without would yes yet you your""".split()
# Words before a private value in loose sentences, and names of a field that holds it.
CUES = {
    "person": (
        ["", "", "", "with", "by", "from", "and", "to", "for", "Mr.", "Ms.", "Mrs.", "Dr.", "called", "both"],
        "name customer user owner contact author witness patient tenant sender",
    ),
    "first": (["", "", "with", "and", "by", "from", "to", "dear", "my son", "my wife"], "name user nickname first"),
    "address": (["", "at", "to", "lives at", "in", "from", "near"], "address home street delivery billing location"),
    "date": (
        ["", "on", "since", "born on", "before", "by", "until", "after"],
        "date born birthday dob since expires day",
    ),
    "email": (["", "", "to", "at", "from", "mail", "write to", "via"], "email mail e-mail contact from login"),
    "phone": (
        ["on", "at", "phone", "call", "number", "ring", "mobile", "text", "tel.", "whatsapp", "fax"],
        "phone tel mobile telephone fax whatsapp cell number",
    ),
    "url": (["", "at", "see", "on", "from", "under", "here:"], "url link website page homepage profile"),
    "account": (
        [
            "account",
            "IBAN",
            "account number",
            "to account",
            "bank account",
            "customer number",
            "IBAN:",
            "member number",
        ],
        "account iban account_number acct customer_number",
    ),
    "card": (["", "card", "Visa", "Mastercard", "with card", "card number"], "card card_number visa creditcard"),
    "ssn": (["", "SSN", "social security number", "number"], "ssn social_security"),
    "passport": (["passport", "passport number", "passport no.", "licence"], "passport licence document"),
    "password": (
        ["password", "the password is", "password:", "pass", "passphrase", "with the password", "key"],
        "password pass passwd pwd passphrase",
    ),
    "pin": (["PIN", "the PIN is", "pin", "code", "door code", "passcode"], "pin passcode code"),
    "secret": (
        ["", "key", "token", "secret", "the API key", "bearer"],
        "api_key token secret key access_token api-key bearer credential",
    ),
}
MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SYLLABLES = """ba be bo bra chi da de do dra el en er fa fi fo ga gi gra ha hel ho in is ja ka ki ko kra la le li lo lu ma me
mi mo na ne ni no ol or pa pe po ra re ri ro sa se shi so ta te ti to tri ul un va ve vi wa we xa ya yo za zi zo""".split()
ENDINGS = "n r s th nd ck l m rt sky son ham ley ton ez ini ova wicz ska berg stein a o i e".split()

# Templates without and with private values; those below HELD_OUT are for measuring only.
TEMPLATES = """
Dear {person},
Hi {first},
Hello {full},
Hey {first}, {clause}.
Thanks, {first}
Best regards, {person}
Kind regards,\\n{person}\\n{address}\\n{phone}
Yours sincerely,\\n\\n{person}
Sincerely, {person}\\n{email}
Regards,\\n{person}\\n{title}, {company}\\n{phone} | {email}
From: {person} <{email}>\\nTo: {person} <{email}>\\nSubject: {clause}
From: {email}\\nTo: {email}\\nDate: {date}\\nSubject: {Phrase}
Cc: {person}, {person}
My name is {person} and I live at {address}.
My name is {person}. My email is {email} and my phone number is {phone}.
I am {person}, born on {date}, and I would like to {verb} my {word}.
This is {person} from {company}. Please call me back on {phone}.
This is {first} from the {word} team, {clause}.
You can reach me at {phone} or {email}.
Please write to {email} if the {word} is {adjective}.
Please contact {person} at {email} about the {word}.
Call {first} on {phone} before {time}.
Call {person} at {phone}, or send a text.
If you have questions, email {email} or call {phone}.
Her number is {phone}, his is {phone}.
My new number is {phone}.
Phone: {phone}
Tel. {phone}, fax {phone}
Mobile: {phone}\\nEmail: {email}
The parcel was sent to {person}, {address}, on {date}.
Please deliver the {word} to {address}.
Ship to:\\n{person}\\n{address}
Address: {address}
We moved to {address} on {date}.
She has lived at {address} since {year}.
Our office is in {city}, but I work from home: {address}.
He was born on {date} in {city}.
Date of birth: {date}
DOB {date}
Name: {person}\\nDate of birth: {date}\\nAddress: {address}\\nPhone: {phone}
name: {lowperson}\\nemail: {email}
Patient: {person}, DOB: {date}, record number {account}.
Patient {person} was admitted on {date} with {word} pain; next visit on {date}.
Dr. {last} saw {person} on {date}.
Mr. {last} and Mrs. {last} asked for a {adjective} {word}.
Ms. {last} will {verb} the {word} on {weekday}.
Professor {person} gave a talk about the {word}.
My appointment with Dr. {last} is on {date} at {time}.
{person} and {person} met at the {word} in {city}.
{person} said that the {word} was {adjective}.
{person} works as a {title} at {company}.
{first} told {first} that {clause}.
{first}: {clause}\\n{first}: {Clause}.\\n{first}: ok
{first} and I will {verb} the {word}.
I talked to {full} yesterday, and {clause}.
Ask {first} for the {word}.
According to {person}, {clause}.
The {word} was written by {person}.
Signed by {person} on {date}.
Employee: {last}, {first}\\nTitle: {title}
Attendees: {person}, {person}, {person}
{person},{email},{phone},{city}
{person};{date};{address}
| {person} | {email} | {date} |
{{"name": "{person}", "email": "{email}", "phone": "{phone}"}}
{{"user": "{first}", "token": "{secret}"}}
{{"id": {number}, "customer": "{person}", "address": "{address}", "total": {price} }}
My account number is {account}.
Please transfer {price} to account {account}.
IBAN: {account}
Account holder: {person}, IBAN {account}
The card number is {card}, valid until {number}/{number}.
Card {card} was charged {price} on {date}.
Pay by card: {card}
Sort code {sortcode}, account number {account}
Social security number: {ssn}
SSN {ssn}
Passport no. {passport}, issued on {date}
My passport number is {passport}.
Member number {account}, {person}
Customer number: {account}
Bank account: {account}, {company}
password: {password}
The password is {password}
Your temporary password is {password}, please change it.
The Wi-Fi password is {password}.
username: {lowword}\\npassword: {password}
login with {email} and {password}
My PIN is {pin}.
The code for the {word} door is {pin}.
API key: {secret}
api_key = "{secret}"
export API_TOKEN={secret}
SECRET_KEY={secret}
Authorization: Bearer {secret}
token: {secret}
Use the key {secret} for the {word} service.
AWS_SECRET_ACCESS_KEY={secret}
client_secret: {secret}\\nclient_id: {lowword}-{number}
DATABASE_PASSWORD={password}
curl -H "X-Api-Key: {secret}" {url}
My profile is at {url}.
Photos of {first}'s birthday: {url}
See {url} for my {word}.
Website: {url}
Reset your password here: {url}
I uploaded the {word} to {url} yesterday.
Join the call: {url}
We got a letter from {person} about the {word}.
Did {first} {verb} the {word}? {first} has it since {weekday}.
Please give the {word} to {first} or {person}.
I met {person} in {city} on {weekday}.
Thanks {first}, {clause}.
My {relative} {first} lives at {address}.
My {relative} {full} will {verb} the {word} for me.
If I am not at home, ring my {relative} {first} at {phone}.
The contract between {company} and {person}, {address}, starts on {date}.
After {date}, send the {word} to {address} instead.
The {word} is paid with my card {card}, and the {word} with {card}.
On {date} I wrote to {email}, but {clause}.
{person} ({email}) and {person} ({email}) will {verb} the {word} on {date}.
{weekday}: {first} at {time}, {full} at {time}
{first}, {first} and {first} have a {adjective} {word}.
Deploy with {secret}, not with the {adjective} key.
The {word} is {adjective}.
The {word} and the {word} were {adjective}, {clause}.
{Clause}.
{Clause}, and {clause}.
{Clause}. {Clause}. {Clause}.
Please {verb} the {word} before {time}.
Can you {verb} the {word} by {weekday}?
We {verb} {number} {word}s every {weekday}.
Order {number} was shipped with {number} items, total {price}.
Your order #{longnumber} has been {adjective}.
Invoice {longnumber}: {number} x {word}, {price}
Ticket #{longnumber} was closed.
Tracking number {tracking}
The train leaves {city} at {time} and arrives in {city} at {time}.
Flight {flight} from {city} to {city} was late.
It will be {number} degrees in {city} on {weekday}.
{company} opened a new {word} in {city}.
{company} and {company} signed a {word} worth {price}.
The {Phrase} takes place in {month} {year}.
In {month} {year} the {word} was {adjective}.
In {year}, the {word} of {city} was {number} percent.
Meeting notes: {Phrase}
# {Phrase}
## {Phrase}\\n\\n{Clause}.
- {clause}\\n- {clause}\\n- {clause}
1. {Phrase}\\n2. {Phrase}
{Phrase}: {number} of {number}
Version {version} of {Word} is out.
Fixed in {version}: {clause}.
{time} INFO {lowword}.{lowword}: {clause} in {number} ms
[{time}] WARN {word} {longnumber} not found
def {lowword}_{lowword}({lowword}, {lowword}): return {lowword} + {number}
commit {commit}: {clause}
git checkout {commit}
let {lowword} = {lowword}.{lowword}({number});
See /{lowword}/{lowword}/{lowword}.txt, line {number}.
The {nonsense} {verb} the {nonsense}.
What is the {word} of the {word}?
Why is the {word} so {adjective}? {Clause}.
Thank you for your {word}.
Dear customer, your {word} is {adjective}.
Dear team,
Hello everyone,
Hi all, {clause}.
To whom it may concern,
Kind regards, the {Word} Team
Password reset is {adjective}: {clause}.
The password must have {number} characters.
Phone support is open on {weekday} from {time} to {time}.
Our address has changed, {clause}.
Email is {adjective}, the {word} is not.
Section {number}.{number}, page {number}: {Phrase}
Price: {price} (was {price})
Room {number}, floor {number}, {weekday} {time}
""".strip().split("\n")
HELD_OUT = """
Good morning {first}, {clause}.
Many thanks in advance,\\n{person}
Cheers,\\n{first}
Reply-To: {person} <{email}>
I, {person}, hereby confirm that {clause}.
For details get in touch with {person} ({email}, {phone}).
You may ring {person} on {phone} after {time}.
Drop me a line at {email}, {clause}.
Contact number: {phone}
WhatsApp {phone}
The flat at {address} belongs to {person}.
Return address: {address}
Visitors should come to {address} at {time}.
Her birthday is {date}; {first} turns {number}.
Born: {date}, {city}
Due to the accident on {date}, {person} can't {verb} the {word}.
{person} has been our {title} since {date}.
Yesterday {full} sent me the {word}, and {first} paid {price}.
Both {person} and {person} think the {word} is {adjective}.
Witness: {person}, {address}
{first} wrote: "{Clause}."
customer={lowperson} mail={email} tel={phone}
{{"first_name": "{first}", "last_name": "{last}", "born": "{date}"}}
<tr><td>{person}</td><td>{phone}</td><td>{address}</td></tr>
Wire the rest to {account}, {clause}.
The refund goes to IBAN {account} of {person}.
Visa {card}, {person}
Savings account no. {account} was closed.
Her social security number {ssn} is on the {word}.
The guest Wi-Fi key is {password}, {clause}.
pass={password}
Log in as {lowword} with the password {password}
ACCESS_TOKEN: {secret}
I pasted the secret {secret} into the {word}.
headers = {{"Authorization": "Bearer {secret}"}}
She shared {url} with {first}.
Album: {url}
Download my {word} from {url}, {clause}.
On {weekday} the {word} will {verb} the {adjective} {word}.
{Clause}; {clause}.
Nobody in {city} could {verb} the {word}, {clause}.
Shares of {company} fell by {number} percent in {month}.
Build {longnumber} failed after {number} seconds: {clause}
The {Phrase} is {adjective}.
Release {version}: {clause}
Seats {number} and {number}, gate {number}, {flight}
{number} {word}s cost {price} in {city}.
if {lowword} > {number}: {lowword}.{lowword}()
""".strip().split("\n")

ADJECTIVES = """ready late broken new closed great cheaper important paid heavy wrong missing confirmed delayed beautiful
small blue open cancelled perfect slow faster unclear free empty expensive ripe""".split()
VERBS = """check send update review cancel open repair return confirm move print paint sell count replace read finish
order close test change""".split()
TITLES = "engineer nurse teacher manager director accountant designer plumber lawyer analyst driver gardener".split()
RELATIVES = "wife husband son daughter sister brother mother father aunt uncle friend boss neighbour colleague".split()
STARTS = "the,our,my,this,that,every,your,their,a,no".split(",")


def part(entries: list[str], held_out: bool) -> list[str]:
    """The entries for training, or those held out."""
    return [entry for index, entry in enumerate(entries) if (index % HELD_OUT_EVERY == 0) == held_out]


def pools(held_out: bool) -> dict[str, list[str]]:
    """The lists of training, or those held out, by name."""
    lists = {"first": FIRST, "last": LAST, "street": STREET, "city": CITY, "domain": DOMAIN}
    return {name: part(entries, held_out) for name, entries in lists.items()} | {
        "template": HELD_OUT if held_out else TEMPLATES
    }
